package gvisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"gvisor.dev/gvisor/runsc/container"

	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/process"
)

// order is what the driver asks of a starter, on its standard input.
type order struct {
	Spec  driver.Spec
	State string // the machine's state directory
	Agent string // host path of the agent
	Probe bool   // mount the root and end, without a machine
}

// answer is what the starter says, on descriptor fdAnswer.
type answer struct {
	Error   string
	Sandbox process.Process
	Gofer   process.Process
}

// Descriptors that a starter inherits.
const (
	fdUserns = 3
	fdAnswer = 4
)

// starterMain starts one machine and ends. It is a process of its own for four
// reasons: it has the mount namespace that the machine keeps; it is in the
// machine's cgroup, so all that it starts is too; gVisor hands its caller's
// standard streams to process 1 and changes its limits, which must not happen
// to the daemon; and what it leaves behind has no parent that could miss it.
func starterMain() int {
	out := os.NewFile(fdAnswer, "answer")
	var o order
	// The driver died before it put this process in its cgroup: no order, no work.
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		return 1
	}
	a, err := start(o)
	if err != nil {
		a = answer{Error: err.Error()}
	}
	if err := json.NewEncoder(out).Encode(a); err != nil {
		return 1 // the driver is gone; whoever comes next ends this machine
	}
	return 0
}

func start(o order) (answer, error) {
	if err := mountRoot(o, fdUserns); err != nil {
		return answer{}, err
	}
	if o.Probe {
		return answer{}, nil
	}
	if err := checkMountPoint(innerRoot, agentPath); err != nil {
		return answer{}, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return answer{}, err
	}
	// Open for reading too: it must not break while no server reads it.
	log, err := os.OpenFile(filepath.Join(innerState, fileAgentLog), os.O_RDWR, 0)
	if err != nil {
		return answer{}, err
	}
	os.Stdin, os.Stdout, os.Stderr = null, null, log // process 1 gets these
	conf, err := runscConfig()
	if err != nil {
		return answer{}, fmt.Errorf("configuration: %w", err)
	}
	spec := ociSpec(o.Spec)
	data, err := json.Marshal(spec)
	if err != nil {
		return answer{}, err
	}
	if err := os.WriteFile(filepath.Join(innerState, fileSpec), data, 0o600); err != nil {
		return answer{}, fmt.Errorf("spec: %w", err)
	}
	c, err := container.New(conf, container.Args{
		ID:        string(o.Spec.ID),
		Spec:      spec,
		BundleDir: innerState,
	})
	if err != nil {
		return answer{}, fmt.Errorf("create sandbox: %w", err)
	}
	if err := c.Start(conf); err != nil {
		return answer{}, fmt.Errorf("start sandbox: %w", err)
	}
	var a answer
	if a.Sandbox, err = process.Identify(c.SandboxPid()); err != nil {
		return answer{}, fmt.Errorf("sandbox process: %w", err)
	}
	if a.Gofer, err = process.Identify(c.GoferPid.Load()); err != nil {
		return answer{}, fmt.Errorf("gofer process: %w", err)
	}
	return a, nil
}

// exposeStubs makes the kernel of the host choose gVisor's stub processes, in
// which the guest's processes run, before the sentry and the gofer when the
// machine's memory runs out: then one guest process dies and not the machine.
// Later stubs inherit it from those that exist now.
func exposeStubs(pids []int, keep ...process.Process) error {
	for _, pid := range pids {
		if pid == keep[0].PID || pid == keep[1].PID {
			continue
		}
		err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("1000"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !isESRCH(err) {
			return err
		}
	}
	return nil
}
