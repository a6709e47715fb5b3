package gvisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/process"
)

// Files in a machine's state directory, beside gVisor's own.
const (
	fileRecord = "record.json" // record
	fileExit   = "exit"        // the sentry's word on how process 1 ended
	fileEnd    = "end.json"    // driver.Exit, the first conclusion
	fileKilled = "killed"      // Kill was called before it had ended
	filePanic  = "panic.log"   // what the sentry's Go runtime said last
	fileSpec   = "config.json" // the OCI spec
)

// record is what a later process needs to know of a machine. It is written
// before the first effect, without Sandbox, and again once it runs.
type record struct {
	Spec    driver.Spec
	BootID  string // of the host: after a reboot nothing of it is left
	Sandbox process.Process
	Gofer   process.Process
}

// load reads the record of id.
func (d *Driver) load(id cloche.SessionID) (*machine, error) {
	data, err := os.ReadFile(filepath.Join(d.stateDir(id), fileRecord))
	if err != nil {
		return nil, err
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("parse: %w", err)
	}
	if r.Spec.ID != id {
		return nil, fmt.Errorf("it is of another session, %q", r.Spec.ID)
	}
	return d.machine(r), nil
}

func (d *Driver) save(r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(d.stateDir(r.Spec.ID), fileRecord), data, 0o600)
}

// writeFile replaces path whole or not at all, as seen by a later process. It
// does not sync: after a power cut there is no machine to be recovered, and
// what was in Dir may go (so this is not atomicfile, which costs two syncs).
func writeFile(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // best effort: the name says that it is a leftover
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return nil
}

// writeOnce creates path with data unless it exists, and returns its content
// and whether that is now data.
func writeOnce(path string, data []byte) (content []byte, first bool, err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-")
	if err != nil {
		return nil, false, err
	}
	_, err = tmp.Write(data)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Link(tmp.Name(), path)
	}
	if rerr := os.Remove(tmp.Name()); err == nil {
		err = rerr
	}
	if errors.Is(err, fs.ErrExist) {
		content, err = os.ReadFile(path)
		return content, false, err
	}
	return data, true, err
}

func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data)), err
}
