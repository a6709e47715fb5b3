// Command cloche is the whole product in one binary: the server, the commands
// that manage it on its host, and the client's command line. This package wires
// the others together and decides nothing of its own.
package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche/cli"
	"github.com/cloche-dev/cloche/driver/gvisor"
)

// version is set by the build: git describe.
var version = "devel"

func main() {
	// The gVisor driver runs this binary again for the processes of a machine.
	gvisor.Dispatch()
	if err := keepDescriptors(); err != nil {
		fmt.Fprintln(os.Stderr, "cloche:", err)
		os.Exit(cli.ExitFailed)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := cli.Main(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr, hostCommands()...)
	stop()
	os.Exit(code)
}

// keepDescriptors marks whatever descriptors this process was started with,
// standard streams aside, so that no process that it starts gets them: not a
// machine, and not mmdebstrap, whose shell lines break on a number over 9.
func keepDescriptors() error {
	err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) // Linux 5.11
	if err != nil {
		return fmt.Errorf("mark inherited descriptors: %w", err)
	}
	return nil
}

// hostCommands are the commands that need more than a client.
func hostCommands() []cli.Command {
	return []cli.Command{
		{Name: "serve", Help: "Run the server.", Cmd: &serveCmd{}},
		{Name: "token", Help: "Make API tokens.", Cmd: &tokenCmd{}},
		{Name: "image", Help: "Build, pull and list images.", Cmd: &imageCmd{}},
		cli.Doctor(gvisorCheck()),
		cli.Bench(),
		{Name: "version", Help: "Print the version.", Cmd: &versionCmd{}},
	}
}

// gvisorCheck is the driver's own word on this host.
func gvisorCheck() cli.Check {
	return cli.Check{
		Name: "gVisor machines",
		Why:  "the driver that makes sandboxes needs them",
		Run: func(ctx context.Context) cli.Result {
			if err := gvisor.Probe(ctx, "", ""); err != nil {
				return cli.Result{Status: cli.Missing, Detail: err.Error(), Fix: "the lines above say which part is missing"}
			}
			return cli.Result{Status: cli.OK, Detail: "namespaces, idmapped overlays, cgroups and seccomp work"}
		},
	}
}
