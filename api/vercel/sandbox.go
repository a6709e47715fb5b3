package vercel

import (
	"context"
	"encoding/json"
	"strings"

	"github.com/cloche-dev/cloche"
)

// legacyRuntime is what a client gets from the v1 and v2 paths that names
// neither runtime nor image: those paths promise a runtime.
const legacyRuntime = "node24"

// createBody is what a create may ask for. Pointers tell what was not said from
// what was said to be nothing.
type createBody struct {
	ProjectID  *string   `json:"projectId"`
	Name       *string   `json:"name"`
	Image      string    `json:"image"`
	Runtime    string    `json:"runtime"`
	Timeout    *float64  `json:"timeout"`
	Resources  resources `json:"resources"`
	Persistent *bool     `json:"persistent"`
	Ports      []int     `json:"ports"`
	Env        stringMap `json:"env"`
	Tags       stringMap `json:"tags"`
	Region     string    `json:"region"`
	laterFields
}

// resources is the size of a machine.
type resources struct {
	VCPUs  *int `json:"vcpus"`
	Memory *int `json:"memory"` // follows vcpus; some clients send it
}

// laterFields are those of create and update whose features come later.
type laterFields struct {
	Source             json.RawMessage `json:"source"`
	NetworkPolicy      json.RawMessage `json:"networkPolicy"`
	NetworkID          json.RawMessage `json:"networkId"`
	Mounts             json.RawMessage `json:"mounts"`
	SnapshotExpiration json.RawMessage `json:"snapshotExpiration"`
	KeepLastSnapshots  json.RawMessage `json:"keepLastSnapshots"`
	CurrentSnapshotID  json.RawMessage `json:"currentSnapshotId"`
	FailoverRegions    json.RawMessage `json:"failoverRegions"`
}

// check refuses what would otherwise be a success that did nothing.
func (l laterFields) check(persistent *bool, ports []int) error {
	for _, f := range []struct {
		raw  json.RawMessage
		what string
	}{
		{l.Source, "sources (source): create the sandbox and write the files"},
		{l.NetworkID, "private networks (networkId)"},
		{l.Mounts, "drives (mounts)"},
		{l.SnapshotExpiration, "snapshots (snapshotExpiration)"},
		{l.KeepLastSnapshots, "snapshots (keepLastSnapshots)"},
		{l.CurrentSnapshotID, "snapshots (currentSnapshotId)"},
		{l.FailoverRegions, "more than one region (failoverRegions)"},
	} {
		if given(f.raw) {
			return notImplemented(f.what)
		}
	}
	if persistent != nil && *persistent {
		return notImplemented("persistent sandboxes: files end with the session; pass persistent: false")
	}
	if len(ports) > 0 {
		return notImplemented("ports that are reachable from outside: pass ports: []")
	}
	if given(l.NetworkPolicy) {
		return checkPolicy(l.NetworkPolicy)
	}
	return nil
}

// checkPolicy accepts the one policy that there is.
func checkPolicy(raw []byte) error {
	var p struct {
		Mode string `json:"mode"`
	}
	if err := unmarshal(raw, &p); err != nil {
		return cloche.Errorf(cloche.CodeInvalid, "the field \"networkPolicy\" is not a policy")
	}
	return checkMode(p.Mode)
}

// checkMode is checkPolicy for the mode of a policy; "" is the form without one,
// which lists what is allowed.
func checkMode(mode string) error {
	if mode != string(cloche.DenyAll) {
		return notImplemented("a network for sandboxes: the only networkPolicy is deny-all, which is also what a sandbox without one gets")
	}
	return nil
}

// request turns the body into what the Service takes.
func (b *createBody) request() (cloche.CreateSandbox, error) {
	var none cloche.CreateSandbox
	if err := b.check(b.Persistent, b.Ports); err != nil {
		return none, err
	}
	if b.Runtime != "" && b.Image != "" {
		return none, cloche.Errorf(cloche.CodeInvalid, "image and runtime exclude each other")
	}
	c := cloche.CreateSandbox{
		Image:     b.Image,
		Runtime:   b.Runtime,
		Region:    b.Region,
		Ephemeral: b.Persistent != nil,
	}
	if b.Name != nil {
		if err := cloche.CheckName(*b.Name); err != nil {
			return none, err
		}
		c.Name = *b.Name
	}
	vcpus, err := b.Resources.vcpus()
	if err != nil {
		return none, err
	}
	if vcpus != nil {
		c.VCPUs = *vcpus
	}
	if b.Timeout != nil {
		if c.Timeout, err = millis(*b.Timeout); err != nil {
			return none, err
		}
		if c.Timeout == 0 {
			return none, cloche.Errorf(cloche.CodeTimeoutInvalid, "a sandbox needs a timeout above 0")
		}
	}
	if c.Env, err = b.Env.check("env"); err != nil {
		return none, err
	}
	c.Tags, err = b.Tags.check("tags")
	return c, err
}

// vcpus is nil if the caller left the number to the server.
func (r resources) vcpus() (*int, error) {
	if r.VCPUs == nil {
		if r.Memory != nil {
			return nil, cloche.Errorf(cloche.CodeInvalid, "memory follows resources.vcpus, %d MiB each; set that", cloche.MemoryMiBPerVCPU)
		}
		return nil, nil
	}
	if *r.VCPUs < 1 || *r.VCPUs > cloche.MaxVCPUs {
		return nil, cloche.Errorf(cloche.CodeInvalid, "resources.vcpus is %d; a sandbox has 1 to %d", *r.VCPUs, cloche.MaxVCPUs)
	}
	if r.Memory != nil && *r.Memory != *r.VCPUs*cloche.MemoryMiBPerVCPU {
		return nil, cloche.Errorf(cloche.CodeInvalid, "resources.memory is %d; it follows resources.vcpus, %d MiB each", *r.Memory, cloche.MemoryMiBPerVCPU)
	}
	return r.VCPUs, nil
}

// createSandbox is the create of version 3, where no runtime is the server's
// choice of a base.
func (c *call) createSandbox() error {
	return c.create(func(v cloche.SandboxView) any { return createdOf(v) }, "")
}

// createLegacySandbox is the create of version 2: all of 2.x, and 3.x with a
// runtime.
func (c *call) createLegacySandbox() error {
	return c.create(func(v cloche.SandboxView) any { return createdOf(v) }, legacyRuntime)
}

// create makes a sandbox and answers with what shape makes of it.
func (c *call) create(shape func(cloche.SandboxView) any, runtime string) error {
	var body createBody
	if err := c.decode(&body, maxBody); err != nil {
		return err
	}
	if body.ProjectID != nil {
		if err := c.checkProject(*body.ProjectID); err != nil {
			return err
		}
	}
	req, err := body.request()
	if err != nil {
		return err
	}
	if req.Image == "" && req.Runtime == "" {
		req.Runtime = runtime
	}
	return c.slowly(false, nil, func(ctx context.Context) (any, error) {
		v, err := c.Service.CreateSandbox(ctx, c.who, req)
		if err != nil {
			return nil, err
		}
		return shape(v), nil
	})
}

// listSandboxes answers one page. A limit over the maximum is the maximum:
// nothing is lost, the cursor goes on from there.
func (c *call) listSandboxes() error {
	q := c.r.URL.Query()
	p, err := page(q)
	if err != nil {
		return err
	}
	l := cloche.ListSandboxes{Page: p, NamePrefix: q.Get("namePrefix")}
	switch s := cloche.SortField(q.Get("sortBy")); s {
	case "", cloche.SortCreatedAt, cloche.SortName, cloche.SortStatusUpdatedAt:
		l.Sort = s
	default:
		return cloche.Errorf(cloche.CodeInvalid, "sortBy %q is none of createdAt, name, statusUpdatedAt", clip(string(s)))
	}
	switch tags := q["tags"]; len(tags) {
	case 0:
	case 1:
		key, value, ok := strings.Cut(tags[0], ":")
		if !ok || key == "" {
			return cloche.Errorf(cloche.CodeInvalid, "tags=%s has not the form key:value", clip(tags[0]))
		}
		l.TagKey, l.TagValue = key, value
	default:
		return cloche.Errorf(cloche.CodeInvalid, "a list can be filtered by one tag")
	}
	views, next, err := c.Service.ListSandboxes(c.r.Context(), c.who, l)
	if err != nil {
		return err
	}
	out := sandboxesAnswer{Sandboxes: make([]sandboxBody, 0, len(views)), Page: pageOf(len(views), next)}
	for _, v := range views {
		out.Sandboxes = append(out.Sandboxes, sandboxOf(v))
	}
	return c.answer(out)
}

// getSandbox is also the one way to start a sandbox again. An absent resume is
// false, although 2.x means true by it: the requests look alike, and every
// client resumes by itself at its first 410.
func (c *call) getSandbox() error {
	name, err := c.name()
	if err != nil {
		return err
	}
	resume, err := boolean(c.r.URL.Query(), "resume")
	if err != nil {
		return err
	}
	return c.slowly(false, nil, func(ctx context.Context) (any, error) {
		v, resumed, err := c.Service.GetSandbox(ctx, c.who, name, resume)
		if err != nil {
			return nil, err
		}
		out := createdOf(v)
		out.Resumed = resumed
		return out, nil
	})
}

// updateBody is what an update may change. A runtime comes from early 2.x.
type updateBody struct {
	Persistent *bool      `json:"persistent"`
	Resources  resources  `json:"resources"`
	Timeout    *float64   `json:"timeout"`
	Tags       *stringMap `json:"tags"`
	Ports      *[]int     `json:"ports"`
	Region     *string    `json:"region"`
	Runtime    *string    `json:"runtime"`
	laterFields
}

// request turns the body into what the Service takes.
func (b *updateBody) request() (cloche.UpdateSandbox, error) {
	u := cloche.UpdateSandbox{Region: b.Region, Ports: b.Ports}
	var ports []int
	if b.Ports != nil {
		ports = *b.Ports
	}
	if err := b.check(b.Persistent, ports); err != nil {
		return u, err
	}
	if b.Runtime != nil {
		return u, cloche.Errorf(cloche.CodeInvalid, "the runtime of a sandbox cannot be changed")
	}
	var err error
	if u.VCPUs, err = b.Resources.vcpus(); err != nil {
		return u, err
	}
	if b.Timeout != nil {
		d, err := millis(*b.Timeout)
		if err != nil {
			return u, err
		}
		u.Timeout = &d
	}
	if b.Tags != nil {
		tags, err := b.Tags.check("tags")
		if err != nil {
			return u, err
		}
		u.Tags = &tags
	}
	return u, nil
}

// updateSandbox answers with routes, which the client puts in place of its own.
func (c *call) updateSandbox() error {
	name, err := c.name()
	if err != nil {
		return err
	}
	var body updateBody
	if err := c.decode(&body, maxBody); err != nil {
		return err
	}
	u, err := body.request()
	if err != nil {
		return err
	}
	v, err := c.Service.UpdateSandbox(c.r.Context(), c.who, name, u)
	if err != nil {
		return err
	}
	return c.answer(sandboxAnswer{Sandbox: sandboxOf(v), Routes: []routeBody{}})
}

// deleteSandbox answers with the record as it last was.
func (c *call) deleteSandbox() error {
	name, err := c.name()
	if err != nil {
		return err
	}
	return c.slowly(false, nil, func(ctx context.Context) (any, error) {
		v, err := c.Service.DeleteSandbox(ctx, c.who, name)
		if err != nil {
			return nil, err
		}
		return sandboxAnswer{Sandbox: sandboxOf(v)}, nil
	})
}

// sandboxAction is POST …/{name}/{action}, of which there is one.
func (c *call) sandboxAction() error {
	if action := c.r.PathValue("action"); action != "fork" {
		return cloche.Errorf(cloche.CodeNotFound, "there is no action %q of a sandbox", clip(action))
	}
	return notImplemented("forks")
}
