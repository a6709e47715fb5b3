package agent

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

const (
	passwdFile = "/etc/passwd"
	groupFile  = "/etc/group"

	maxAccounts = 1 << 20 // bytes read of each
	maxGroups   = 1024    // supplementary groups of one user
	maxID       = 1<<32 - 2
)

// account is a user as the machine's files describe it.
type account struct {
	name     string
	uid, gid int
	groups   []int // supplementary, the primary one included
	home     string
	shell    string
}

// root is the account that holds where the files say nothing of uid 0.
func rootAccount() account {
	return account{name: "root", groups: []int{0}, home: "/root", shell: "/bin/sh"}
}

// accounts are the machine's files of users and groups. Commands change them,
// so each look asks whether they have; reading them each time would cost a
// command in gVisor a twentieth of its start.
type accounts struct {
	passwd, group accountFile
}

func newAccounts() *accounts {
	return &accounts{passwd: accountFile{path: passwdFile}, group: accountFile{path: groupFile}}
}

// lookup resolves "name", "uid", "name:group" or "uid:gid"; "" is root.
func (a *accounts) lookup(spec string) (account, error) {
	passwd, err := a.passwd.read()
	if err != nil {
		return account{}, err
	}
	group, err := a.group.read()
	if err != nil {
		return account{}, err
	}
	return resolve(spec, passwd, group)
}

// accountFile is one file, read again when it is another or has changed.
type accountFile struct {
	path string

	mu   sync.Mutex
	seen fileState
	data []byte
}

// fileState tells a file's content from an earlier one. Editors of accounts
// write a new file and rename it, so that the inode alone already differs.
type fileState struct {
	ino          uint64
	size         int64
	mtime, ctime unix.Timespec
}

// read returns the content; a file that is missing is empty.
func (f *accountFile) read() ([]byte, error) {
	var st unix.Stat_t
	err := unix.Stat(f.path, &st)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	// Taken before the content: a change in between is seen by the next look.
	now := fileState{st.Ino, st.Size, st.Mtim, st.Ctim}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.data != nil && f.seen == now {
		return f.data, nil
	}
	data, err := readBounded(f.path, maxAccounts)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f.seen, f.data = now, data
	return data, nil
}

// resolve is lookup on the content of the files.
func resolve(spec string, passwd, group []byte) (account, error) {
	name, groupSpec, hasGroup := strings.Cut(spec, ":")
	u, ok := findUser(name, passwd)
	if !ok {
		return account{}, cloche.Errorf(cloche.CodeInvalid, "no user %.64q in this sandbox", name)
	}
	if hasGroup {
		gid, ok := findGroup(groupSpec, group)
		if !ok {
			return account{}, cloche.Errorf(cloche.CodeInvalid, "no group %.64q in this sandbox", groupSpec)
		}
		u.gid, u.groups = gid, []int{gid}
		return u, nil
	}
	u.groups = memberships(u, group)
	return u, nil
}

// findUser looks for a name, then for a number. A number that has no entry is a
// user all the same, as in OCI images: of group 0, without a home.
func findUser(name string, passwd []byte) (account, bool) {
	number, isNumber := parseID(name)
	var byNumber *account
	for u := range eachUser(passwd) {
		if u.name == name {
			return u, true
		}
		if isNumber && u.uid == number && byNumber == nil {
			byNumber = &u
		}
	}
	switch {
	case byNumber != nil:
		return *byNumber, true
	case name == "" || name == "root" || isNumber && number == 0:
		if name != "root" {
			return findUser("root", passwd)
		}
		return rootAccount(), true
	case isNumber:
		return account{name: name, uid: number, home: "/", shell: "/bin/sh"}, true
	}
	return account{}, false
}

// eachUser goes through the lines of passwd(5) that are well formed.
func eachUser(passwd []byte) func(yield func(account) bool) {
	return func(yield func(account) bool) {
		for line := range bytes.Lines(passwd) {
			f := strings.Split(string(bytes.TrimRight(line, "\r\n")), ":")
			if len(f) != 7 || f[0] == "" {
				continue
			}
			uid, okUID := parseID(f[2])
			gid, okGID := parseID(f[3])
			if !okUID || !okGID {
				continue
			}
			u := account{name: f[0], uid: uid, gid: gid, home: f[5], shell: f[6]}
			if u.home == "" {
				u.home = "/"
			}
			if u.shell == "" {
				u.shell = "/bin/sh"
			}
			if !yield(u) {
				return
			}
		}
	}
}

// groupLine is one line of group(5).
type groupLine struct {
	name    string
	gid     int
	members string
}

func eachGroup(group []byte) func(yield func(groupLine) bool) {
	return func(yield func(groupLine) bool) {
		for line := range bytes.Lines(group) {
			f := strings.Split(string(bytes.TrimRight(line, "\r\n")), ":")
			if len(f) != 4 {
				continue
			}
			if gid, ok := parseID(f[2]); ok && !yield(groupLine{f[0], gid, f[3]}) {
				return
			}
		}
	}
}

func findGroup(spec string, group []byte) (int, bool) {
	for g := range eachGroup(group) {
		if g.name == spec {
			return g.gid, true
		}
	}
	return parseID(spec)
}

// memberships gives the groups of u, its primary one first.
func memberships(u account, group []byte) []int {
	out := []int{u.gid}
	seen := map[int]bool{u.gid: true}
	for g := range eachGroup(group) {
		if seen[g.gid] || len(out) == maxGroups {
			continue
		}
		for m := range strings.SplitSeq(g.members, ",") {
			if m == u.name {
				out = append(out, g.gid)
				seen[g.gid] = true
				break
			}
		}
	}
	return out
}

func parseID(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return int(n), err == nil && n <= maxID
}
