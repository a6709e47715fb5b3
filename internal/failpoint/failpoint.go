// Package failpoint marks the places where a test kills the process: before and
// after every effect that outlives a crash. In production a mark is one load of
// a nil pointer.
//
// A mark's name is package/operation/place, all lower case. Names are unique in
// the code base; a test reads the sources, lists every call of Here, and kills
// the daemon at each of them, so a new mark is tested by being there.
package failpoint

import (
	"os"
	"strings"
	"syscall"
)

// EnvVar names the environment variable that arms one mark for the life of the
// process: "name" kills it with SIGKILL there. It is read once, at start.
const EnvVar = "CLOCHE_FAILPOINT"

var armed = os.Getenv(EnvVar)

// Here kills the process with SIGKILL if name is armed, as kill -9 from outside
// would: no deferred call runs.
func Here(name string) {
	if armed == "" || !strings.EqualFold(armed, name) {
		return
	}
	// The process is gone when this returns; there is nothing to report to.
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
