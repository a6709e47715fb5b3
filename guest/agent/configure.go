package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"reflect"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

const (
	hostsFile = "/etc/hosts"
	maxHosts  = 1 << 20 // bytes of it that are looked at
)

// configure applies the machine's configuration, once.
func (a *Agent) configure(c guest.Config) (guest.Identity, error) {
	if err := checkConfig(c); err != nil {
		return guest.Identity{}, err
	}
	u, err := a.accounts.lookup(c.User)
	if err != nil {
		return guest.Identity{}, err
	}
	id := guest.Identity{UID: u.uid, GID: u.gid, Home: u.home, WorkDir: path.Clean(c.WorkDir)}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config != nil {
		if !reflect.DeepEqual(*a.config, c) {
			return guest.Identity{}, cloche.Errorf(cloche.CodeConflict, "the machine is configured already, in another way")
		}
		return id, nil
	}
	if err := setHostname(c.Hostname); err != nil {
		a.log.Warn("host name", "error", err)
	}
	if err := nameInHosts(c.Hostname); err != nil {
		a.log.Warn("host name in /etc/hosts: sudo may complain", "error", err)
	}
	if err := makeWorkDir(path.Clean(c.WorkDir), u); err != nil {
		return guest.Identity{}, fileError(c.WorkDir, err)
	}
	if err := a.groups.limit(c.MemoryBytes, c.PIDs); err != nil {
		a.log.Warn("limits of all commands", "error", err)
	}
	a.config = &c
	return id, nil
}

func checkConfig(c guest.Config) error {
	switch {
	case !path.IsAbs(c.WorkDir) || strings.ContainsRune(c.WorkDir, 0):
		return cloche.Errorf(cloche.CodeInvalid, "the working directory %.256q is not absolute", c.WorkDir)
	case strings.ContainsAny(c.Hostname, " \t\r\n\x00#") || len(c.Hostname) > 63:
		return cloche.Errorf(cloche.CodeInvalid, "%.64q is no host name", c.Hostname)
	case c.PIDs < 0 || c.MemoryBytes < 0:
		return cloche.Errorf(cloche.CodeInvalid, "a negative limit")
	}
	for k := range c.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(c.Env[k], 0) {
			return cloche.Errorf(cloche.CodeInvalid, "%.64q cannot be an environment variable", k)
		}
	}
	return nil
}

func setHostname(name string) error {
	have, err := os.Hostname()
	if name == "" || err == nil && have == name {
		return nil
	}
	return unix.Sethostname([]byte(name))
}

// nameInHosts makes the host name resolvable, as sudo wants it. It changes only
// a regular file of its own name.
func nameInHosts(name string) (err error) {
	if name == "" {
		return nil
	}
	b, err := readBounded(hostsFile, maxHosts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for line := range bytes.Lines(b) {
		line, _, _ = bytes.Cut(line, []byte("#"))
		for i, f := range bytes.Fields(line) {
			if i > 0 && string(f) == name {
				return nil
			}
		}
	}
	f, err := os.OpenFile(hostsFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err == nil {
		err = regular(info)
	}
	if err != nil {
		return err
	}
	entry := "127.0.1.1\t" + name + "\n"
	if len(b) == 0 {
		entry = "127.0.0.1\tlocalhost\n" + entry
	} else if b[len(b)-1] != '\n' {
		entry = "\n" + entry
	}
	_, err = f.WriteString(entry)
	return err
}

// makeWorkDir makes dir, with parents that are root's, and gives it to u if it
// was not there.
func makeWorkDir(dir string, u account) (err error) {
	if info, err := os.Stat(dir); err == nil {
		if !info.IsDir() {
			return unix.ENOTDIR
		}
		return nil
	}
	if err := os.MkdirAll(path.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	d, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Chown(u.uid, u.gid); err != nil {
		return fmt.Errorf("give to the user: %w", err)
	}
	return nil
}
