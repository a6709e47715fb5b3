package cloche

// SessionState is the state of a session. The spelling is the wire's.
type SessionState string

// The states. Stopped, Failed and Aborted are final.
const (
	// Pending: the record exists, the machine is being made.
	Pending SessionState = "pending"
	// Running: the agent has answered.
	Running SessionState = "running"
	// Stopping: processes are being ended. No new work is accepted.
	Stopping SessionState = "stopping"
	// Snapshotting: as Stopping, and what the session wrote is being kept.
	Snapshotting SessionState = "snapshotting"
	// Stopped: ended on request or by its timeout.
	Stopped SessionState = "stopped"
	// Failed: the machine never came up.
	Failed SessionState = "failed"
	// Aborted: the machine ended although nobody had asked for it.
	Aborted SessionState = "aborted"
)

// transitions is the only place that says which state may follow which.
// Nothing sets a state except through SessionState.To.
var transitions = map[SessionState][]SessionState{
	Pending:      {Running, Stopping, Failed},
	Running:      {Stopping, Snapshotting, Aborted},
	Stopping:     {Stopped, Aborted},
	Snapshotting: {Stopped, Aborted},
}

// SessionStates lists every state in the order of a session's life.
func SessionStates() []SessionState {
	return []SessionState{Pending, Running, Stopping, Snapshotting, Stopped, Failed, Aborted}
}

// To returns next if the table allows that step, and else an *Error of
// CodeConflict.
func (s SessionState) To(next SessionState) (SessionState, error) {
	for _, t := range transitions[s] {
		if t == next {
			return next, nil
		}
	}
	return s, Errorf(CodeConflict, "a session that is %s cannot become %s", s, next)
}

// Final reports whether no other state can follow.
func (s SessionState) Final() bool { return s == Stopped || s == Failed || s == Aborted }
