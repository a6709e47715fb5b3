package agent

import (
	"errors"
	"fmt"
	"os"
	"path"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

const (
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	defaultTerm = "xterm-256color"

	exitNotFound   = 127 // as shells say it
	exitNotAllowed = 126

	// self runs this binary in a child, wherever it lies and whoever may reach
	// that place.
	self = "/proc/self/exe"
)

// plan is a command ready to be started.
type plan struct {
	user account
	dir  string
	env  []string
	path string // of the executable
	argv []string

	// careful looks again as the user; nil once it has. See newPlan.
	careful func() error
}

// newPlan checks what can be checked before the fork, as the user that the
// command will run as. A command that is not there gives a plan that says so on
// its standard error and exits with 127 or 126, as a shell would.
func (a *Agent) newPlan(id cloche.CommandID, s guest.Start, cfg guest.Config, mark bool) (*plan, error) {
	if err := checkStart(s); err != nil {
		return nil, err
	}
	spec := s.User
	if spec == "" {
		spec = cfg.User
	}
	caller, err := a.accounts.lookup(spec)
	if err != nil {
		return nil, err
	}
	p := &plan{user: caller, dir: absolute(cfg.WorkDir, s.WorkDir), argv: s.Argv}
	if s.Sudo {
		if p.user, err = a.accounts.lookup("root"); err != nil {
			return nil, err
		}
	}
	env := environment(s, cfg, p.user, caller)
	if mark {
		env[envCommand] = string(id)
	}
	p.env = flatten(env)
	// What root sees is nearly always what the user would, and changing the
	// thread's ids costs a twentieth of a command's start. If the kernel then
	// refuses to start it, the look is repeated as the user.
	p.careful = func() error {
		p.careful = nil
		return as(p.user, func() error { return p.find(s.Argv[0], env["PATH"]) })
	}
	if found, err := findExecutable(s.Argv[0], env["PATH"], p.dir, p.user); err == nil {
		p.path = found
		return p, nil
	}
	return p, p.careful()
}

// find looks for the directory and the executable with the calling thread's
// permissions.
func (p *plan) find(name, search string) error {
	if err := checkDir(p.dir); err != nil {
		return err
	}
	found, err := findExecutable(name, search, p.dir, p.user)
	if err != nil {
		p.fail(err)
		return nil
	}
	p.path = found
	return nil
}

// fail makes the plan one that reports err, with the shells' exit code for it.
func (p *plan) fail(err error) {
	code, why := exitNotAllowed, "cannot be executed"
	switch {
	case errors.Is(err, errNotFound):
		code, why = exitNotFound, "command not found"
	case errors.Is(err, unix.ENOENT):
		code, why = exitNotFound, "no such file, or its interpreter is missing"
	case errors.Is(err, unix.EACCES):
		why = "permission denied"
	case errors.Is(err, unix.EISDIR):
		why = "is a directory"
	case errors.Is(err, unix.ENOEXEC):
		why = "not in a format that the kernel executes"
	}
	p.path = self
	p.argv = []string{"cloche-agent", "fail", fmt.Sprint(code), fmt.Sprintf("%.4096s: %s", p.argv[0], why)}
}

func checkStart(s guest.Start) error {
	switch {
	case len(s.Argv) == 0 || s.Argv[0] == "":
		return cloche.Errorf(cloche.CodeInvalid, "there is no command to run")
	case s.Timeout < 0:
		return cloche.Errorf(cloche.CodeInvalid, "a negative timeout")
	case strings.ContainsRune(s.WorkDir, 0):
		return cloche.Errorf(cloche.CodeInvalid, "the working directory contains a NUL byte")
	}
	for i, arg := range s.Argv {
		if strings.ContainsRune(arg, 0) {
			return cloche.Errorf(cloche.CodeInvalid, "argument %d contains a NUL byte", i)
		}
	}
	for k, v := range s.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return cloche.Errorf(cloche.CodeInvalid, "%.64q cannot be an environment variable", k)
		}
	}
	return nil
}

// absolute resolves dir against base by its letters, as cd does.
func absolute(base, dir string) string {
	if path.IsAbs(dir) {
		return path.Clean(dir)
	}
	return path.Join("/", base, dir)
}

// environment composes what the command will see. What the caller gave wins,
// then who it runs as if that is not the default user, then the machine's.
func environment(s guest.Start, cfg guest.Config, user, caller account) map[string]string {
	env := map[string]string{"PATH": defaultPath, "LANG": "C.UTF-8"}
	set := func(more map[string]string) {
		for k, v := range more {
			env[k] = v
		}
	}
	who := map[string]string{"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell}
	set(who)
	set(cfg.Env)
	if s.Sudo || s.User != "" {
		set(who)
	}
	if s.Sudo {
		set(map[string]string{
			"SUDO_USER": caller.name,
			"SUDO_UID":  fmt.Sprint(caller.uid),
			"SUDO_GID":  fmt.Sprint(caller.gid),
		})
	}
	if s.PTY != nil && env["TERM"] == "" {
		env["TERM"] = defaultTerm
	}
	set(s.Env)
	return env
}

func flatten(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	sort.Strings(out)
	return out
}

// checkDir reports why a command of the current user cannot start in dir.
func checkDir(dir string) error {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err == nil {
		err = unix.Stat(dir+"/.", &st) // takes the permission to search dir
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		return cloche.Errorf(cloche.CodeInvalid, "the working directory %.256q does not exist", dir)
	case errors.Is(err, unix.ENOTDIR):
		return cloche.Errorf(cloche.CodeInvalid, "the working directory %.256q is not a directory", dir)
	case errors.Is(err, unix.EACCES):
		return cloche.Errorf(cloche.CodeInvalid, "the working directory %.256q may not be entered by this user", dir)
	}
	return cloche.Errorf(cloche.CodeInvalid, "the working directory %.256q: %v", dir, err)
}

// errNotFound: no directory of PATH has the name.
var errNotFound = errors.New("not in PATH")

// findExecutable looks name up as execvp does, with the permissions of u.
func findExecutable(name, search, dir string, u account) (string, error) {
	if strings.Contains(name, "/") {
		p := name
		if !path.IsAbs(p) {
			p = dir + "/" + p
		}
		return p, executable(p, u)
	}
	err := errNotFound
	for _, d := range strings.Split(search, ":") {
		if d == "" {
			d = "."
		}
		if !path.IsAbs(d) {
			d = dir + "/" + d
		}
		p := d + "/" + name
		switch cerr := executable(p, u); {
		case cerr == nil:
			return p, nil
		case errors.Is(cerr, unix.EACCES):
			err = cerr // there, and not for this user: goes on, and says so at the end
		}
	}
	return "", err
}

// executable reports why u cannot execute the file p, going by its mode: execve
// has the last word.
func executable(p string, u account) error {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return &os.PathError{Op: "stat", Path: p, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.EISDIR
	}
	bits := st.Mode & 0o111
	switch {
	case u.uid == 0:
	case int(st.Uid) == u.uid:
		bits &= 0o100
	case member(u, int(st.Gid)):
		bits &= 0o010
	default:
		bits &= 0o001
	}
	if bits == 0 {
		return unix.EACCES
	}
	return nil
}

func member(u account, gid int) bool {
	for _, g := range u.groups {
		if g == gid {
			return true
		}
	}
	return u.gid == gid
}
