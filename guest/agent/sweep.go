package agent

import "sync"

// maxUnswept bounds the groups that are looked at again at each sweep.
const maxUnswept = 4096

// unswept are groups of ended commands in which processes still lived.
type unswept struct {
	mu   sync.Mutex
	list []group
}

// sweep gives back g, and those before it whose last process has ended since.
func (a *Agent) sweep(g group) {
	a.rest.mu.Lock()
	defer a.rest.mu.Unlock()
	var keep []group
	for _, old := range append(a.rest.list, g) {
		if !old.remove() && len(keep) < maxUnswept {
			keep = append(keep, old)
		}
	}
	a.rest.list = keep
}
