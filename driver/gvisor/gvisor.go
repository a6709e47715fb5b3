// Package gvisor makes machines with gVisor, a kernel in user space that is
// part of this binary: each machine is a process tree of our own executable,
// run again as gVisor's sentry and gofer (Dispatch). It implements
// driver.Driver; the packages that prepare images, layers and networks are not
// its business.
//
// # One machine on the host
//
//	Dir/machines/ID/       the record, gVisor's state and control socket
//	CgroupParent/ID        cgroup: limits, accounting, and the way to kill
//	the process tree       sentry, gofer and gVisor's stub processes
//
// There is nothing else. The overlay that is the root file system is mounted in
// a mount namespace of the machine's own, so that it vanishes with the last
// process and no crash can leave it behind. A short-lived child, the starter,
// sets that up and starts gVisor; this process is never the parent of a
// machine, so a machine is the same to the process that started it and to the
// one that recovers it.
package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	gvlog "gvisor.dev/gvisor/pkg/log"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/overlay"
)

// Config configures a Driver.
type Config struct {
	// Dir holds the state of machines. It may vanish at a reboot, and only
	// one process at a time may start or remove machines in it. Absolute.
	Dir string

	// AgentPath is the static executable that is process 1 of every machine.
	// Agent is its content, for a binary that embeds it; one of the two.
	AgentPath string
	Agent     []byte

	// CgroupParent is the cgroup, from the root of the hierarchy, under which
	// machines get theirs. "" = "/cloche-" and a hash of Dir: two servers
	// with two directories must not see each other's machines.
	CgroupParent string

	// Exe is the executable to run again, whose main calls Dispatch first. ""
	// = this one. It must be static: there is no loader in the empty root of
	// gVisor's processes. So tests that are built with cgo need another.
	Exe string

	Log *slog.Logger // nil = slog.Default()
}

// Driver implements driver.Driver.
type Driver struct {
	conf     Config
	agent    string // host path of the agent, named by its digest
	machines string // directory of the records
	cgroups  hierarchy
	userns   *os.File // maps 0.. to driver.IDOffset.. for idmapped mounts
	log      *slog.Logger
	locks    idLocks
	logs     agentLogs
}

var _ driver.Driver = (*Driver)(nil)

// maxVCPUs is far more than most hosts have: the sentry takes any number and
// the cgroup's quota bounds the use.
const maxVCPUs = cloche.MaxVCPUs

// New prepares the directory and what all machines share. It starts nothing.
func New(conf Config) (_ *Driver, err error) {
	if conf.Log == nil {
		conf.Log = slog.Default()
	}
	if conf.Exe == "" {
		conf.Exe = "/proc/self/exe"
	}
	if !filepath.IsAbs(conf.Dir) {
		return nil, cloche.Errorf(cloche.CodeInvalid, "the state directory must be an absolute path")
	}
	if conf.CgroupParent == "" {
		sum := sha256.Sum256([]byte(filepath.Clean(conf.Dir)))
		conf.CgroupParent = "/cloche-" + hex.EncodeToString(sum[:4])
	}
	// gVisor logs what its RPC client meets, byte by byte, to standard error.
	// The same comes back as errors.
	gvlog.SetTarget(gvlog.GoogleEmitter{Writer: &gvlog.Writer{Next: io.Discard}})
	d := &Driver{conf: conf, machines: filepath.Join(conf.Dir, "machines"), log: conf.Log}
	if err := os.MkdirAll(d.machines, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if d.agent, err = installAgent(conf); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	if d.cgroups, err = openHierarchy(conf.CgroupParent); err != nil {
		return nil, fmt.Errorf("cgroups: %w", err)
	}
	if d.userns, err = overlay.UserNamespace(); err != nil {
		return nil, err
	}
	return d, nil
}

// installAgent puts the agent where machines mount it from. The name carries
// the digest, so running machines keep the one that they were started with.
func installAgent(conf Config) (string, error) {
	data := conf.Agent
	if data == nil {
		var err error
		if data, err = os.ReadFile(conf.AgentPath); err != nil {
			return "", err
		}
	}
	sum := sha256.Sum256(data)
	path := filepath.Join(conf.Dir, "agent-"+hex.EncodeToString(sum[:8]))
	if _, err := os.Lstat(path); err == nil {
		return path, nil
	}
	return path, writeFile(path, data, 0o555)
}

// Name implements driver.Driver.
func (d *Driver) Name() string { return "gvisor" }

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() driver.Capabilities {
	return driver.Capabilities{MaxVCPUs: maxVCPUs}
}

// Recover implements driver.Driver.
func (d *Driver) Recover(ctx context.Context, id cloche.SessionID) (driver.Machine, error) {
	if !id.Valid() {
		return nil, notFound(id)
	}
	defer d.locks.lock(id)()
	m, err := d.load(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, lerr := os.Lstat(d.stateDir(id)); lerr != nil && !d.cgroups.exists(id) {
			return nil, notFound(id)
		}
		// Cut off before the record was whole: there is no more of it.
		m = d.machine(record{Spec: driver.Spec{ID: id}})
	case err != nil:
		return nil, fmt.Errorf("record of %s: %w", id, err)
	}
	if m.rec.Sandbox.PID == 0 {
		if err := m.abandon(ctx); err != nil {
			return nil, fmt.Errorf("end half-made machine %s: %w", id, err)
		}
	}
	if m.alive() {
		if err := d.logs.follow(m); err != nil {
			return nil, fmt.Errorf("recover %s: %w", id, err)
		}
	}
	return m, nil
}

// List implements driver.Driver.
func (d *Driver) List(context.Context) ([]cloche.SessionID, error) {
	entries, err := os.ReadDir(d.machines)
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	groups, err := d.cgroups.list()
	if err != nil {
		return nil, fmt.Errorf("list cgroups: %w", err)
	}
	seen := map[cloche.SessionID]bool{}
	for _, e := range entries {
		seen[cloche.SessionID(e.Name())] = true
	}
	for _, g := range groups {
		seen[cloche.SessionID(g)] = true
	}
	var ids []cloche.SessionID
	for id := range seen {
		if id.Valid() {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Remove implements driver.Driver.
func (d *Driver) Remove(ctx context.Context, id cloche.SessionID) error {
	if !id.Valid() {
		return nil
	}
	m, err := d.load(id)
	if err != nil {
		// Unreadable or not there: what can exist has the id in its name.
		m = d.machine(record{Spec: driver.Spec{ID: id}})
	}
	return m.Release(ctx)
}

// Close implements driver.Driver. Machines go on.
func (d *Driver) Close() error {
	d.logs.close()
	d.cgroups.tidy()
	if err := d.userns.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func (d *Driver) stateDir(id cloche.SessionID) string {
	return filepath.Join(d.machines, string(id))
}

func notFound(id cloche.SessionID) error {
	return cloche.Errorf(cloche.CodeNotFound, "no machine runs session %s", id)
}

// idLocks serializes what makes and unmakes one machine. The zero value is
// ready.
type idLocks struct {
	mu sync.Mutex
	m  map[cloche.SessionID]*idLock
}

type idLock struct {
	sync.Mutex
	users int // guarded by idLocks.mu
}

// lock blocks until id is free and returns the function that frees it.
func (l *idLocks) lock(id cloche.SessionID) (unlock func()) {
	l.mu.Lock()
	if l.m == nil {
		l.m = map[cloche.SessionID]*idLock{}
	}
	e := l.m[id]
	if e == nil {
		e = &idLock{}
		l.m[id] = e
	}
	e.users++
	l.mu.Unlock()
	e.Lock()
	return func() {
		e.Unlock()
		l.mu.Lock()
		defer l.mu.Unlock()
		if e.users--; e.users == 0 {
			delete(l.m, id)
		}
	}
}
