package gvisor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/subcommands"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/flag"
)

// starterName is argv[0] of the starter. gVisor's own processes have
// "runsc-sandbox" and "runsc-gofer" there, and "/proc/self/exe" for the helper
// that unmounts /proc.
const starterName = "runsc-starter"

// Dispatch runs the process as one of gVisor's, or as the starter of a machine,
// if that is what it was started for, and then never returns. Otherwise it
// returns at once. It must be the first call in main of the executable that
// the driver runs again, and in TestMain of tests.
func Dispatch() {
	base := filepath.Base(os.Args[0])
	switch {
	case base == starterName:
		os.Exit(starterMain())
	case strings.HasPrefix(base, "runsc-"):
	case os.Args[0] == "/proc/self/exe" && len(os.Args) > 1 && os.Args[1] == "umount":
	default:
		return
	}
	os.Args = sizeFlags(os.Args)
	// Only what runs inside a machine: the whole of runsc would more than
	// double this binary.
	cli.Run(nil, map[util.SubCommand]string{
		&bootCommand{Boot: new(sentrycmd.Boot)}: "",
		new(cmd.Gofer):                          "",
		new(sentrycmd.Umount):                   "",
	}, nil)
	os.Exit(128) // cli.Run ends the process itself
}

// Annotations in the OCI spec that carry a machine's size to sizeFlags.
const (
	annotationVCPUs  = "dev.cloche.vcpus"
	annotationMemory = "dev.cloche.memory-bytes"
)

// sizeFlags appends the machine's size to the arguments of the sentry. gVisor
// itself derives the number of CPUs from the cgroup's cpuset, or from its quota
// with a floor of 2; and it bounds a tmpfs without a size, such as /dev, by half
// of the host's memory, which is here made a quarter of the machine's. The last
// of several values of a flag wins.
func sizeFlags(args []string) []string {
	spec := -1
	boot := false
	for _, a := range args {
		boot = boot || a == "boot"
		if v, ok := strings.CutPrefix(a, "--spec-fd="); ok && boot {
			if _, err := fmt.Sscanf(v, "%d", &spec); err != nil {
				return args
			}
		}
	}
	if !boot || spec < 0 {
		return args
	}
	var s struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(readAll(spec), &s); err != nil {
		return args // gVisor will say what is wrong with it
	}
	var vcpus, mem int64
	for annotation, n := range map[string]*int64{annotationVCPUs: &vcpus, annotationMemory: &mem} {
		if _, err := fmt.Sscanf(s.Annotations[annotation], "%d", n); err != nil {
			return args
		}
	}
	out := append([]string(nil), args[:len(args)-1]...)
	return append(out,
		fmt.Sprintf("--cpu-num=%d", vcpus),
		fmt.Sprintf("--total-memory=%d", mem),
		fmt.Sprintf("--total-host-memory=%d", mem/2),
		args[len(args)-1])
}

// readAll reads a file from its start without moving its offset, which belongs
// to gVisor.
func readAll(fd int) []byte {
	var data []byte
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Pread(fd, buf, int64(len(data)))
		if n <= 0 || err != nil {
			return data
		}
		data = append(data, buf[:n]...)
	}
}

// bootCommand is gVisor's sentry, which leaves word of how process 1 ended:
// nobody is its parent by then who could wait for it.
type bootCommand struct{ *sentrycmd.Boot }

// Execute implements util.SubCommand.
func (b *bootCommand) Execute(ctx context.Context, f *flag.FlagSet, args ...any) subcommands.ExitStatus {
	// Opened before the sentry closes itself in. It is a file of the host that
	// only this process holds: no guest can name it.
	exit, err := os.OpenFile(innerExit, os.O_WRONLY, 0)
	if err != nil {
		util.Fatalf("open exit file: %v", err)
	}
	status := b.Boot.Execute(ctx, f, args...)
	if ws, ok := args[1].(*unix.WaitStatus); ok && status == subcommands.ExitSuccess {
		word := fmt.Sprintf("exit %d\n", ws.ExitStatus())
		if ws.Signaled() {
			word = fmt.Sprintf("signal %d\n", ws.Signal())
		}
		// On a failure the end counts as a crash; there is nobody to tell.
		_, _ = exit.WriteString(word)
	}
	return status
}
