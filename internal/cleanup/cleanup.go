// Package cleanup is the undo stack: each step that leaves something on the
// host pushes the step that takes it away, and a function that fails unwinds.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Timeout bounds the whole of one Unwind. Undo must not hang a caller for ever,
// and what it leaves is found by the next recovery.
const Timeout = 30 * time.Second

// Stack is a list of undo steps. The zero value is empty. Not safe for
// concurrent use.
type Stack struct {
	steps []step
}

type step struct {
	noun string
	undo func(context.Context) error
}

// Push adds an undo step. noun names what it takes away, for its error.
func (s *Stack) Push(noun string, undo func(context.Context) error) {
	s.steps = append(s.steps, step{noun, undo})
}

// Release forgets all steps: what they would have undone is kept.
func (s *Stack) Release() { s.steps = nil }

// Unwind runs the steps, latest first, each whether or not another failed, and
// forgets them. The cancellation of ctx is ignored, its values are kept. The
// error joins those of the steps.
func (s *Stack) Unwind(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Timeout)
	defer cancel()
	var errs []error
	for i := len(s.steps) - 1; i >= 0; i-- {
		if err := s.steps[i].undo(ctx); err != nil {
			errs = append(errs, fmt.Errorf("undo %s: %w", s.steps[i].noun, err))
		}
	}
	s.steps = nil
	return errors.Join(errs...)
}
