package control

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// creation is a CreateSandbox in flight. Its client's retry meets it under the
// same name.
type creation struct {
	caller <-chan struct{} // closed if the client goes away
	done   chan struct{}   // closed when it is decided
}

// CreateSandbox makes a sandbox and its first session and returns when that
// runs. After an error nothing of it is left and the name is free. A client
// that goes away before the answer has made nothing.
func (c *Control) CreateSandbox(ctx context.Context, p cloche.Principal, r cloche.CreateSandbox) (cloche.SandboxView, error) {
	done, err := c.begin()
	if err != nil {
		return cloche.SandboxView{}, err
	}
	defer done()
	if err := c.checkCreate(&r); err != nil {
		return cloche.SandboxView{}, err
	}
	image, err := c.images.Image(ctx, r.Image)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	b, err := c.newSandbox(p, &r, &image)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	s := newSession(&b)
	b.SessionID, s.RequestedAt, s.UpdatedAt = s.ID, b.CreatedAt, b.CreatedAt
	l, err := c.admit(&s)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	decided, err := c.record(ctx, &b, &s)
	if err != nil {
		c.release(l)
		return cloche.SandboxView{}, err
	}
	defer decided()
	up, err := c.bring(ctx, l, s, b.Env, true)
	if err == nil && ctx.Err() != nil {
		err = c.discard(ctx, l)
	}
	if err != nil {
		c.count.createFailed.Add(1)
		return cloche.SandboxView{}, err
	}
	return c.created(ctx, l, &b, up)
}

// created is the answer of a creation that nobody undid. Unless up, somebody
// has asked for the session's end before it ran: the sandbox with its ended
// session is the truth then, unless that is gone too.
func (c *Control) created(ctx context.Context, l *life, b *cloche.Sandbox, up bool) (v cloche.SandboxView, err error) {
	if !up {
		if err := c.wait(ctx, l.final, stopWait); err != nil {
			return v, err
		}
	}
	v.Sandbox = *b
	v.Session, err = c.store.Session(ctx, l.id)
	if cloche.ErrorCode(err) == cloche.CodeNotFound {
		return v, cloche.Errorf(cloche.CodeConflict, "the sandbox %q was deleted while it was being made", b.Name)
	}
	if err == nil {
		c.count.created.Add(1)
	}
	return v, err
}

// discard undoes a creation whose client has gone while it was coming up.
func (c *Control) discard(ctx context.Context, l *life) error {
	if l.claim() {
		c.work.Go(func() {
			c.finish(context.WithoutCancel(ctx), l, end{state: cloche.Stopped, cause: "the client went away", discard: true})
		})
	}
	return errors.Join(ctx.Err(), c.wait(context.WithoutCancel(ctx), l.final, stopWait))
}

// record writes the records of a new sandbox. An empty name is filled in. The
// caller calls decided when the creation has come to its end.
func (c *Control) record(ctx context.Context, b *cloche.Sandbox, s *cloche.Session) (decided func(), err error) {
	const tries = 10
	made := b.Name == ""
	for try := 1; ; try++ {
		if made {
			b.Name = newName()
		}
		key := boxName{b.Team, b.Project, b.Name}
		failpoint.Here("control/create/before-record")
		err := c.store.CreateSandbox(context.WithoutCancel(ctx), *b, *s)
		if err == nil {
			failpoint.Here("control/create/after-record")
			return c.register(ctx, key), nil
		}
		if cloche.ErrorCode(err) != cloche.CodeConflict || try == tries {
			return nil, err
		}
		if !made && !c.undone(ctx, key) {
			return nil, err
		}
	}
}

func (c *Control) register(ctx context.Context, key boxName) (decided func()) {
	n := &creation{caller: ctx.Done(), done: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.creating[key] = n
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.creating[key] == n {
			delete(c.creating, key)
		}
		close(n.done)
	}
}

// undone reports whether a name that is taken may be free now: it belonged to a
// creation whose client has gone, and that has been decided since. This is how
// a client whose connection broke can repeat its request at once.
func (c *Control) undone(ctx context.Context, key boxName) bool {
	c.mu.Lock()
	n := c.creating[key]
	c.mu.Unlock()
	if n == nil {
		return false
	}
	select {
	case <-n.caller:
		return c.wait(ctx, n.done, stopWait) == nil
	default:
		return false
	}
}

// defaultPath is the PATH of an image that sets none; Debian's for root.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// newSandbox makes the record of a request that checkCreate has passed.
func (c *Control) newSandbox(p cloche.Principal, r *cloche.CreateSandbox, image *cloche.Image) (cloche.Sandbox, error) {
	now := time.Now()
	b := cloche.Sandbox{
		ID:        cloche.NewSandboxID(),
		Team:      p.Team,
		Project:   p.Project,
		Name:      r.Name,
		Image:     image.Reference(),
		ImageID:   image.ID,
		Runtime:   r.Runtime,
		User:      image.Config.User,
		WorkDir:   image.Config.WorkDir,
		VCPUs:     r.VCPUs,
		MemoryMiB: r.VCPUs * cloche.MemoryMiBPerVCPU,
		Timeout:   r.Timeout,
		Ports:     slices.Clone(r.Ports),
		Env:       maps.Clone(r.Env),
		Tags:      maps.Clone(r.Tags),
		Region:    r.Region,
		Policy:    cloche.Policy{Mode: cloche.DenyAll},
		CreatedAt: now,
		UpdatedAt: now,
	}
	// Clients resolve relative paths against it, and the default user writes
	// there: the root directory would serve neither.
	if b.WorkDir == "" || b.WorkDir == "/" {
		b.WorkDir = cloche.DefaultWorkDir
	}
	if r.Runtime == "" {
		return b, nil
	}
	rt, ok := image.Config.Runtimes[r.Runtime]
	if !ok {
		return b, noRuntime(r.Runtime, image)
	}
	b.User = rt.User
	if _, own := b.Env["PATH"]; !own {
		path := image.Config.Env["PATH"]
		if path == "" {
			path = defaultPath
		}
		if b.Env == nil {
			b.Env = make(map[string]string)
		}
		b.Env["PATH"] = rt.Path + ":" + path
	}
	return b, nil
}

func noRuntime(name string, image *cloche.Image) error {
	have := slices.Sorted(maps.Keys(image.Config.Runtimes))
	if len(have) == 0 {
		return cloche.Errorf(cloche.CodeInvalid, "the image %s offers no runtimes; leave the runtime out", image.Name)
	}
	return cloche.Errorf(cloche.CodeInvalid, "the image %s has no runtime %.64q; it has %s", image.Name, name, strings.Join(have, ", "))
}

// newSession makes the record of a session of b that is to start now.
func newSession(b *cloche.Sandbox) cloche.Session {
	now := time.Now()
	return cloche.Session{
		ID:          cloche.NewSessionID(),
		SandboxID:   b.ID,
		Team:        b.Team,
		Project:     b.Project,
		State:       cloche.Pending,
		ImageID:     b.ImageID,
		Runtime:     b.Runtime,
		User:        b.User,
		WorkDir:     b.WorkDir,
		VCPUs:       b.VCPUs,
		MemoryMiB:   b.MemoryMiB,
		Timeout:     b.Timeout,
		Region:      b.Region,
		Policy:      b.Policy,
		RequestedAt: now,
		UpdatedAt:   now,
	}
}
