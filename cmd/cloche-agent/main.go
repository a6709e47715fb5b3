// Command cloche-agent is process 1 of a machine ("init"), and two helpers that
// are run inside it: "hand" gives its standard input and output to process 1 as
// a channel, and "fail" stands in for a command that could not be executed.
package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"github.com/cloche-dev/cloche/guest/agent"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	switch {
	case len(args) == 1 && args[0] == "init":
		return initialize()
	case len(args) == 1 && args[0] == "hand":
		if err := agent.Hand(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "cloche-agent:", err)
			return 1
		}
		return 0
	case len(args) == 3 && args[0] == "fail":
		fmt.Fprintln(os.Stderr, "cloche:", args[2])
		if code, err := strconv.Atoi(args[1]); err == nil {
			return code
		}
	}
	fmt.Fprintln(os.Stderr, "usage: cloche-agent init | hand | fail CODE MESSAGE")
	return 2
}

// initialize runs process 1, for good: it returns only if it cannot serve.
func initialize() int {
	// The main thread stays ours: threads that take on a user's ids are others.
	runtime.LockOSThread()
	// The work is system calls and hand-overs between goroutines. With one
	// processor a hand-over wakes no thread, which is what costs in gVisor:
	// small commands and pings took 10 to 30 % less time.
	runtime.GOMAXPROCS(1)
	log := agent.Logger()
	a, err := agent.New(log)
	if err == nil {
		var s *agent.Socket
		if s, err = agent.ListenSocket(log); err == nil {
			err = a.Run(context.Background(), s)
		}
	}
	log.Error("the agent ends", "error", err)
	return 1
}
