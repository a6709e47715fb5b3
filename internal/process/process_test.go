package process

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"
)

func TestWait(t *testing.T) {
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !p.Alive() {
		t.Error("a running process is not alive")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait = %v, want the deadline's error", err)
	}
	ended := make(chan error)
	go func() { ended <- p.Wait(t.Context()) }()
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Wait = %v", err)
	}
	if p.Alive() {
		t.Error("a zombie is alive")
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(t.Context()); err != nil || p.Alive() {
		t.Errorf("after it is gone: Wait = %v, alive %v", err, p.Alive())
	}
}

// TestReusedPID: another process with the same PID is not the one that is meant.
func TestReusedPID(t *testing.T) {
	p, err := Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	p.Start--
	if p.Alive() {
		t.Error("alive by its PID alone")
	}
	if err := p.Wait(t.Context()); err != nil {
		t.Errorf("Wait = %v", err)
	}
	if (Process{}).Alive() {
		t.Error("no process is alive")
	}
}
