// Package driver is the contract between a node and whatever makes machines.
// It is the specification: drivertest holds every driver to it.
//
// # Vocabulary
//
// A machine is the isolated thing that runs one session: a kernel of its own
// (user-space or real), a root file system, our agent as process 1. A driver
// makes machines of one kind. The top is the directory or disk that takes what
// the session writes. The channel is a byte stream from the host to the agent
// that does not touch the machine's network.
//
// # The life of a machine
//
//	m, err := d.Start(ctx, driver.Spec{ID: id, ...}) // the agent process exists
//	conn, err := m.Dial(ctx)                         // a channel; speak package guest on it
//	...
//	m.Kill(ctx)                                      // everything inside has ended
//	exit, err := m.Wait(ctx)                         // why it ended
//	m.Release(ctx)                                   // nothing of it is left on the host but its top
//
// A machine outlives the process that started it. After a restart:
//
//	ids, err := d.List(ctx)           // everything of ours on this host, alive or not
//	m, err := d.Recover(ctx, id)      // adopt it, then as above
//
// # Rules that hold for every method
//
// A driver is crash-only: if the process is killed inside any method, the next
// process finds what is left by List, and Recover or Remove succeeds on it.
// What a driver makes on the host carries the session's id in its name. Errors
// are *cloche.Error, or wrap one, where the caller may act on them; any other
// error is a fault of the host. No method trusts anything that a machine says.
// All methods may be called concurrently, also for one machine.
package driver

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/cloche-dev/cloche"
)

// Driver makes machines of one kind on this host.
type Driver interface {
	// Name is the driver's name on the command line: "gvisor", "microvm".
	Name() string

	// Capabilities says what its machines can do. It never changes.
	Capabilities() Capabilities

	// Start makes the machine and starts the agent in it. It returns as soon
	// as Dial can be tried; the agent may need a moment more. On an error,
	// and when ctx ends first, nothing is left behind. An id that exists is
	// an *Error of CodeConflict; a Spec that the driver cannot honour is one
	// of CodeInvalid, never silently something smaller.
	Start(ctx context.Context, spec Spec) (Machine, error)

	// Recover adopts a machine that an earlier process started, alive or
	// ended. An unknown id is an *Error of CodeNotFound. A machine whose Start
	// was cut off is ended first: Recover then returns it as ended.
	Recover(ctx context.Context, id cloche.SessionID) (Machine, error)

	// List gives the id of everything of this driver that is on the host,
	// whole or not: whatever Recover or Remove would find.
	List(ctx context.Context) ([]cloche.SessionID, error)

	// Remove ends and removes whatever is left of id, however incomplete. It
	// is idempotent: nothing left is success.
	Remove(ctx context.Context, id cloche.SessionID) error

	// Close releases what the driver holds in this process. Machines go on.
	Close() error
}

// Machine is one machine. Its methods stay valid after it has ended.
type Machine interface {
	// ID is the id of the session that it runs.
	ID() cloche.SessionID

	// Dial opens a fresh channel to the agent: reliable, ordered, both ways,
	// with deadlines. It waits for an agent that has only just been started.
	// Earlier channels may be closed by it (virtio-serial has one). It fails
	// with CodeGone once the machine has ended, also if that happens while it
	// waits. ctx bounds the dial, not the channel. A channel of a machine that
	// has ended reads io.EOF or fails; it never blocks.
	Dial(ctx context.Context) (net.Conn, error)

	// Stats reads what the machine has used so far, from the host's own
	// accounting, never from the machine. After the end it gives the last
	// reading, as complete as the host could still make it.
	Stats(ctx context.Context) (Stats, error)

	// Wait blocks until the machine has ended and says why. Any number of
	// callers, any number of times, the same answer each time.
	Wait(ctx context.Context) (Exit, error)

	// Kill ends the machine at once: when it returns nil, no process of it
	// runs. What the guest had synced is on the top. Idempotent.
	Kill(ctx context.Context) error

	// Release kills the machine if need be and removes all that it has on the
	// host: mounts, cgroups, namespaces, state files. The top stays. When it
	// returns nil, List no longer has the id. Idempotent.
	Release(ctx context.Context) error
}

// Spec is a machine to be made.
type Spec struct {
	// ID names the session; it becomes part of host resources' names.
	ID cloche.SessionID

	// Hostname inside: letters, digits and '-', at most 63 characters.
	Hostname string

	// VCPUs is what nproc shows inside and the bound on CPU use. At least 1.
	VCPUs int

	// MemoryMiB is what free shows as total and a hard bound on what the
	// machine takes from the host, its own kernel included. At least 256.
	MemoryMiB int

	Root Root
}

// MinMemoryMiB is the least memory of a machine.
const MinMemoryMiB = 256

var hostnameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)

// Check returns an *Error of CodeInvalid unless s is well formed, within c, and
// of directories that exist. Every driver calls it first in Start.
func (s Spec) Check(c Capabilities) error {
	switch {
	case !s.ID.Valid():
		return cloche.Errorf(cloche.CodeInvalid, "the session id has not the form of one")
	case !hostnameForm.MatchString(s.Hostname):
		return cloche.Errorf(cloche.CodeInvalid, "a host name has 1 to 63 letters, digits and '-'")
	case s.VCPUs < 1 || s.VCPUs > c.MaxVCPUs:
		return cloche.Errorf(cloche.CodeInvalid, "a machine has 1 to %d vCPUs, not %d", c.MaxVCPUs, s.VCPUs)
	case s.MemoryMiB < MinMemoryMiB:
		return cloche.Errorf(cloche.CodeInvalid, "a machine has at least %d MiB of memory, not %d", MinMemoryMiB, s.MemoryMiB)
	}
	for _, dir := range append([]string{s.Root.Image, s.Root.Top}, s.Root.Layers...) {
		info, err := os.Lstat(dir)
		if !filepath.IsAbs(dir) || err != nil || !info.IsDir() {
			return cloche.Errorf(cloche.CodeInvalid, "the image, each layer and the top are directories with absolute paths")
		}
	}
	return nil
}

// Root is a file system: a read-only image, frozen layers over it, and the
// session's top over all. Paths are absolute host paths inside the data
// directory.
type Root struct {
	// Image is the tree of the image, owned by uid and gid as inside, that is
	// without any shift. The driver never writes to it.
	Image string

	// Layers are frozen tops, oldest first, in the form that the driver left
	// them in. The driver never writes to them.
	Layers []string

	// Top is a directory that exists and belongs to this session alone. An
	// empty one is a fresh start; the driver lays out what it needs in it,
	// and the guest's ids in it are shifted by IDOffset. One that a machine
	// has used before is gone on with.
	Top string
}

// TopUpper is the directory in a top, and so in a layer, that holds what the
// session changed, as overlayfs writes it: whiteouts are character devices 0/0,
// a replaced directory has trusted.overlay.opaque, a renamed one
// trusted.overlay.redirect. For drivers whose tops are trees.
const TopUpper = "upper"

// IDOffset is added to every uid and gid of a guest to get the host's: guest
// root is host uid 100000. IDCount ids are mapped. The identity mapping would
// let a guest plant setuid-root files on the host.
const (
	IDOffset = 100000
	IDCount  = 65536
)

// Capabilities says what the machines of a driver can do.
type Capabilities struct {
	// MaxVCPUs is the largest Spec.VCPUs, at least 1.
	MaxVCPUs int

	// HardwareIsolated is true if the boundary is hardware virtualization.
	HardwareIsolated bool

	// Suspend is true if machines can be suspended with their memory.
	Suspend bool

	// SetClock is true if the guest's clock is its own and the agent has to
	// set it; false if the guest reads the host's.
	SetClock bool
}

// Stats is the host's accounting of one machine.
type Stats struct {
	CPU         time.Duration // CPU time of everything of the machine
	MemoryBytes int64         // now; 0 after the end
	PeakBytes   int64         // 0 where the host cannot tell
	Processes   int           // host processes that carry the machine
}

// Exit says why a machine ended.
type Exit struct {
	Cause  ExitCause
	Detail string    // for the log and the session's Cause; no host paths
	At     time.Time // when it was noticed
}

// ExitCause is the kind of an Exit.
type ExitCause string

// The causes.
const (
	// ExitKilled: Kill, Release or Remove ended it.
	ExitKilled ExitCause = "killed"
	// ExitStopped: the agent ended: it was told to, or root inside killed it.
	ExitStopped ExitCause = "stopped"
	// ExitOOM: the kernel of the host killed it for its memory.
	ExitOOM ExitCause = "oom"
	// ExitCrashed: its process ended in any other way, or was cut off in Start.
	ExitCrashed ExitCause = "crashed"
)
