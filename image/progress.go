package image

import "sync"

// Step is one report of how far a build or a pull has come.
type Step struct {
	// Name is the step in a few words, "download packages". Reports of one step
	// follow one another; another name is another line.
	Name string
	// Detail is what the step is at now; may be empty.
	Detail string
	// Done and Total count bytes. Total 0 = the amount is not known.
	Done, Total int64
	// End is true in the last report of a step that was completed.
	End bool
}

// Progress is told how far a build or a pull has come, by one goroutine at a
// time. It must not block. nil is silence.
type Progress func(Step)

// meter counts the bytes of one step. Safe for concurrent use.
type meter struct {
	mu   sync.Mutex
	tell Progress
	step Step
}

// begin reports the start of a step.
func (p Progress) begin(name string, total int64) *meter {
	m := &meter{tell: p, step: Step{Name: name, Total: total}}
	m.update(func(*Step) {})
	return m
}

func (m *meter) add(n int64) { m.update(func(s *Step) { s.Done += n }) }

func (m *meter) set(done int64) { m.update(func(s *Step) { s.Done = done }) }

// grow adds to the total of a step whose amount shows itself bit by bit.
func (m *meter) grow(n int64) { m.update(func(s *Step) { s.Total += n }) }

func (m *meter) detail(d string) { m.update(func(s *Step) { s.Detail = d }) }

// end reports that the step was completed.
func (m *meter) end() {
	m.update(func(s *Step) {
		s.End = true
		if s.Total > 0 {
			s.Done = s.Total
		}
	})
}

func (m *meter) update(change func(*Step)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.step)
	if m.tell != nil {
		m.tell(m.step)
	}
}

// meterWriter counts what is written to it.
type meterWriter struct{ m *meter }

func (w meterWriter) Write(p []byte) (int, error) {
	w.m.add(int64(len(p)))
	return len(p), nil
}
