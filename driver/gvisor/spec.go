package gvisor

import (
	"fmt"
	"path/filepath"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/overlay"
)

// agentPath is where the agent is in the machine, on a tmpfs: nothing that a
// guest writes can take its place in the next session.
const agentPath = "/run/cloche/agent"

// maxMemoryMiB keeps sums of sizes far from overflow.
const maxMemoryMiB = 1 << 20

// check returns an *Error of CodeInvalid unless a machine can be made of s.
func (d *Driver) check(s driver.Spec) error {
	if err := s.Check(d.Capabilities()); err != nil {
		return err
	}
	if s.MemoryMiB > maxMemoryMiB {
		return cloche.Errorf(cloche.CodeInvalid, "a machine has at most %d MiB of memory, not %d", maxMemoryMiB, s.MemoryMiB)
	}
	if len(s.Root.Layers) > overlay.MaxLayers {
		return cloche.Errorf(cloche.CodeInvalid, "a file system has at most %d layers, not %d", overlay.MaxLayers, len(s.Root.Layers))
	}
	return nil
}

// ociSpec describes the machine to gVisor, with paths as in the starter's root.
func ociSpec(s driver.Spec) *specs.Spec {
	mem := int64(s.MemoryMiB) << 20
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: driver.IDOffset, Size: driver.IDCount}}
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{
			Args:         []string{agentPath, "init"},
			Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Cwd:          "/",
			Capabilities: specutils.AllCapabilities(), // of the guest's kernel, not of the host's
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 65536, Hard: 1 << 20}},
		},
		Root:     &specs.Root{Path: innerRoot},
		Hostname: s.Hostname,
		Mounts:   mounts(mem),
		Linux: &specs.Linux{
			UIDMappings: ids,
			GIDMappings: ids,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.UserNamespace},
				{Type: specs.PIDNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.NetworkNamespace},
				{Type: specs.CgroupNamespace},
			},
		},
		Annotations: map[string]string{
			annotationVCPUs:  strconv.Itoa(s.VCPUs),
			annotationMemory: strconv.FormatInt(mem, 10),
		},
	}
}

// mounts lists the file systems of a machine beside its root. Every tmpfs has a
// size: what is in one is memory that no process can be killed for.
func mounts(mem int64) []specs.Mount {
	size := func(n int64) string { return fmt.Sprintf("size=%d", n) }
	return []specs.Mount{
		{Destination: "/proc", Type: "proc"},
		{Destination: "/sys", Type: "sysfs", Options: []string{"ro"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup"},
		{Destination: "/dev", Type: "tmpfs", Options: []string{"mode=755", size(64 << 10)}},
		{Destination: "/dev/pts", Type: "devpts"},
		{Destination: "/dev/shm", Type: "tmpfs", Options: []string{"mode=1777", size(mem / 2)}},
		{Destination: "/run", Type: "tmpfs", Options: []string{"mode=755", size(mem / 8)}},
		{Destination: agentPath, Type: "bind", Source: innerAgent, Options: []string{"bind", "ro"}},
		// gVisor puts an unsized tmpfs over an empty /tmp unless a mount has
		// that destination, and skips a mount of an unknown type: so /tmp stays
		// on the root (runsc/boot/vfs.go, mountTmp and getMountNameAndOptions).
		{Destination: "/tmp", Type: "stays-on-root"},
	}
}

// runscConfig is gVisor's own configuration.
func runscConfig() (*config.Config, error) {
	fs := flag.NewFlagSet(starterName, flag.ContinueOnError)
	config.RegisterFlags(fs)
	for name, value := range map[string]string{
		"root":                    innerState,
		"panic-log":               filepath.Join(innerState, filePanic),
		"platform":                "systrap",
		"network":                 "none",
		"overlay2":                "none", // the overlay is the host's, so nothing is lost with the process
		"directfs":                "true",
		"file-access":             "exclusive",
		"allow-suid":              "true",
		"in-sandbox-cgroup":       "v2",
		"ignore-cgroups":          "true", // ours, made before the first process of the machine
		"host-settings":           "ignore",
		"sidecar-usage-policy":    "LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		"gofer-network-namespace": "new",
	} {
		if err := fs.Set(name, value); err != nil {
			return nil, fmt.Errorf("flag %s: %w", name, err)
		}
	}
	return config.NewFromFlags(fs)
}
