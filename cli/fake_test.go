package cli

import (
	"archive/tar"
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
	"github.com/cloche-dev/cloche/internal/frames"
)

// fake is a server that answers as the real one does. Its sandboxes are
// directories, and their commands run in them, on this host, unprotected.
type fake struct {
	root string // of the sandboxes' directories

	mu       sync.Mutex
	boxes    map[string]*fakeBox
	requests []string // method and path, for assertions
	running  sync.WaitGroup
}

type fakeBox struct {
	view     client.View
	commands []*fakeCommand
}

// fakeCommand is a command; mu guards all of it.
type fakeCommand struct {
	mu      sync.Mutex
	changed *sync.Cond
	record  client.Command
	log     []cloche.LogEntry
	done    bool
	process *os.Process
}

const fakeToken = "clo_test"

func newFake(root string) *fake {
	return &fake{root: root, boxes: map[string]*fakeBox{}}
}

func (f *fake) handler() http.Handler {
	mux := http.NewServeMux()
	const session = "/api/v2/sandboxes/sessions/{sid}"
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request){
		"POST /api/v3/sandboxes":              f.create,
		"POST /api/v2/sandboxes":              f.create,
		"GET /api/v2/sandboxes":               f.list,
		"GET /api/v2/sandboxes/sessions":      f.sessions,
		"GET /api/v2/sandboxes/{name}":        f.get,
		"DELETE /api/v2/sandboxes/{name}":     f.remove,
		"POST /api/v2/sandboxes/{name}/fork":  f.later,
		"GET " + session:                      f.session,
		"POST " + session + "/snapshot":       f.later,
		"POST " + session + "/stop":           f.stop,
		"POST " + session + "/extend-timeout": f.extend,
		"POST " + session + "/cmd":            f.run,
		"GET " + session + "/cmd":             f.ps,
		"GET " + session + "/cmd/{cid}":       f.command,
		"GET " + session + "/cmd/{cid}/logs":  f.logs,
		"POST " + session + "/cmd/{cid}/kill": f.kill,
		"POST " + session + "/fs/write":       f.write,
		"POST " + session + "/fs/read":        f.read,
	} {
		mux.HandleFunc(pattern, h)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.requests = append(f.requests, r.Method+" "+strings.TrimPrefix(r.URL.Path, "/api"))
		f.mu.Unlock()
		if r.Header.Get("Authorization") != "Bearer "+fakeToken {
			refuse(w, http.StatusUnauthorized, cloche.CodeUnauthorized, "the token is not valid")
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// close ends all commands and waits for them.
func (f *fake) close() {
	f.mu.Lock()
	for _, box := range f.boxes {
		box.killAll()
	}
	f.mu.Unlock()
	f.running.Wait()
}

func (b *fakeBox) killAll() {
	for _, c := range b.commands {
		c.signal(syscall.SIGKILL)
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, status int, code cloche.Code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"code": code, "message": message}})
}

func (f *fake) later(w http.ResponseWriter, _ *http.Request) {
	refuse(w, http.StatusBadRequest, cloche.CodeNotImplemented, "snapshots are not implemented yet by this server")
}

func millis(t time.Time) client.Millis { return client.Millis(t.UnixMilli()) }

func (f *fake) create(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Name, Image, Runtime string
		Timeout              client.Millis
		Resources            struct{ VCPUs int }
		Persistent           *bool
		Tags                 map[string]string
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		refuse(w, http.StatusBadRequest, cloche.CodeInvalid, err.Error())
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if body.Name == "" {
		body.Name = "made-up-name"
	}
	switch {
	case f.boxes[body.Name] != nil:
		refuse(w, http.StatusConflict, cloche.CodeConflict, "the name "+body.Name+" is taken")
		return
	case body.Image == "nowhere":
		refuse(w, http.StatusNotFound, cloche.CodeNotFound, "there is no image nowhere")
		return
	}
	box := &fakeBox{view: client.View{Sandbox: client.Sandbox{
		Name: body.Name, Image: "universal@sha256:0123456789abcdef", Tags: body.Tags,
		VCPUs: max(body.Resources.VCPUs, 2), CreatedAt: millis(time.Now()), Timeout: max(body.Timeout, 300_000),
	}}}
	box.view.Sandbox.MemoryMiB = 2048 * box.view.Sandbox.VCPUs
	f.boxes[body.Name] = box
	f.start(box)
	answer(w, box.view)
}

// start gives the box a new session.
func (f *fake) start(box *fakeBox) {
	s := &box.view.Sandbox
	now := time.Now()
	box.view.Session = client.Session{
		ID: cloche.NewSessionID(), Status: cloche.Running, WorkDir: filepath.Join(f.root, s.Name),
		VCPUs: s.VCPUs, MemoryMiB: s.MemoryMiB, Timeout: s.Timeout, Runtime: "node24",
		RequestedAt: millis(now), CreatedAt: millis(now), StartedAt: millis(now),
		NetworkPolicy: map[string]any{"mode": "deny-all"},
	}
	s.Status, s.CurrentSessionID, s.WorkDir = cloche.Running, box.view.Session.ID, box.view.Session.WorkDir
	s.ExpiresAt = millis(now) + s.Timeout
	if err := os.MkdirAll(s.WorkDir, 0o755); err != nil {
		panic(err)
	}
}

func (f *fake) list(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := []string{}
	for name := range f.boxes {
		if strings.HasPrefix(name, r.FormValue("namePrefix")) && name > r.FormValue("cursor") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var next *string
	if len(names) > 2 { // small pages, so that paging happens
		names = names[:2]
		next = &names[1]
	}
	list := []client.Sandbox{}
	for _, name := range names {
		list = append(list, f.boxes[name].view.Sandbox)
	}
	answer(w, map[string]any{"sandboxes": list, "pagination": map[string]any{"count": len(list), "next": next}})
}

func (f *fake) sessions(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := []client.Session{}
	if box := f.boxes[r.FormValue("name")]; box != nil {
		list = append(list, box.view.Session)
	}
	answer(w, map[string]any{"sessions": list, "pagination": map[string]any{"count": len(list), "next": nil}})
}

// box finds a sandbox by name or session, or answers.
func (f *fake) box(w http.ResponseWriter, r *http.Request) *fakeBox {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, box := range f.boxes {
		if name == r.PathValue("name") || r.PathValue("sid") == string(box.view.Session.ID) {
			return box
		}
	}
	refuse(w, http.StatusNotFound, cloche.CodeNotFound, "no such sandbox")
	return nil
}

func (f *fake) get(w http.ResponseWriter, r *http.Request) {
	box := f.box(w, r)
	if box == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	view := box.view
	if r.FormValue("resume") == "true" && box.view.Session.Status.Final() {
		f.start(box)
		view = box.view
		view.Resumed = true
	}
	answer(w, view)
}

func (f *fake) session(w http.ResponseWriter, r *http.Request) {
	if box := f.box(w, r); box != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		answer(w, map[string]any{"session": box.view.Session, "routes": []client.Route{}})
	}
}

func (f *fake) remove(w http.ResponseWriter, r *http.Request) {
	if box := f.box(w, r); box != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		box.killAll()
		delete(f.boxes, r.PathValue("name"))
		answer(w, map[string]any{"sandbox": box.view.Sandbox})
	}
}

func (f *fake) stop(w http.ResponseWriter, r *http.Request) {
	if box := f.box(w, r); box != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		box.killAll()
		box.view.Session.Status, box.view.Sandbox.Status = cloche.Stopped, cloche.Stopped
		box.view.Session.StoppedAt = millis(time.Now())
		answer(w, map[string]any{"session": box.view.Session})
	}
}

func (f *fake) extend(w http.ResponseWriter, r *http.Request) {
	var body struct{ Duration client.Millis }
	_ = json.NewDecoder(r.Body).Decode(&body)
	if box := f.box(w, r); box != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		if body.Duration.Duration() > cloche.MaxTimeout {
			refuse(w, http.StatusBadRequest, cloche.CodeTimeoutInvalid, "a session may last 24h0m0s")
			return
		}
		box.view.Session.Timeout += body.Duration
		answer(w, map[string]any{"session": box.view.Session})
	}
}

type fakeRun struct {
	Command, Cwd string
	Args         []string
	Env          map[string]string
	Timeout      client.Millis
	Wait         bool
}

func (f *fake) run(w http.ResponseWriter, r *http.Request) {
	box := f.box(w, r)
	if box == nil {
		return
	}
	var body fakeRun
	in := &fakeStdin{r: bufio.NewReader(r.Body)}
	duplex := http.NewResponseController(w)
	var stdin io.Reader
	if r.Header.Get(frames.StdinHeader) == frames.StdinStream {
		_ = duplex.EnableFullDuplex()
		w.Header().Set("Connection", "close")
		line, _ := in.r.ReadBytes('\n')
		_ = json.Unmarshal(line, &body)
		stdin = in
	} else {
		_ = json.NewDecoder(in).Decode(&body)
	}
	if f.box(w, r).view.Session.Status.Final() {
		refuse(w, http.StatusGone, cloche.CodeGone, "the session has ended")
		return
	}
	cmd := f.launch(box, body, stdin)
	if !body.Wait {
		answer(w, map[string]any{"command": cmd.snapshot()})
		return
	}
	w.Header().Set("Content-Type", frames.MediaType)
	put := func(t frames.Type, v any) {
		p, raw := v.([]byte)
		if !raw {
			p, _ = json.Marshal(v)
		}
		_, _ = w.Write(frames.Append(nil, t, p))
		_ = duplex.Flush()
	}
	put(frames.Command, cmd.snapshot())
	switch body.Command { // faults
	case "fake-cut":
		put(frames.Stdout, []byte("half"))
		panic(http.ErrAbortHandler)
	case "fake-lost":
		put(frames.Failure, map[string]any{"code": cloche.CodeGone, "message": "the session ended before the command did"})
		return
	case "fake-expire":
		f.mu.Lock()
		s := &box.view.Session
		s.Status, s.Cause, s.Timeout = cloche.Stopping, client.CauseTimeout, 2000
		f.mu.Unlock()
		cmd.end(143, 15, "")
	}
	cmd.follow(r, put)
	put(frames.End, cmd.snapshot())
	if stdin != nil {
		// The client goes on sending until it has read the end. A connection
		// that is closed on unread bytes is reset, and the end lost with it.
		in.drain()
	}
}

// fakeStdin is a request body with two readers: the command, and at the end
// whoever throws the rest away.
type fakeStdin struct {
	mu sync.Mutex
	r  *bufio.Reader
}

func (s *fakeStdin) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.r.Read(p)
}

func (s *fakeStdin) drain() { _, _ = io.Copy(io.Discard, struct{ io.Reader }{s}) }

// follow writes the log until the command has ended.
func (c *fakeCommand) follow(r *http.Request, put func(frames.Type, any)) {
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-r.Context().Done():
			c.signal(syscall.SIGKILL)
		case <-stop:
		}
	}()
	for i := 0; ; i++ {
		c.mu.Lock()
		for i >= len(c.log) && !c.done {
			c.changed.Wait()
		}
		if i >= len(c.log) {
			c.mu.Unlock()
			return
		}
		e := c.log[i]
		c.mu.Unlock()
		put(map[cloche.Stream]frames.Type{cloche.Stdout: frames.Stdout, cloche.Stderr: frames.Stderr}[e.Stream], e.Data)
	}
}

// launch starts a command and returns at once.
func (f *fake) launch(box *fakeBox, body fakeRun, stdin io.Reader) *fakeCommand {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &fakeCommand{record: client.Command{
		ID: cloche.NewCommandID(), SessionID: box.view.Session.ID, Name: body.Command, Args: body.Args,
		WorkDir: filepath.Join(box.view.Session.WorkDir, body.Cwd), StartedAt: millis(time.Now()),
	}}
	if filepath.IsAbs(body.Cwd) {
		c.record.WorkDir = body.Cwd
	}
	c.changed = sync.NewCond(&c.mu)
	box.commands = append(box.commands, c)
	program := body.Command
	if own := filepath.Join(f.root, "bin", program); fileExists(own) {
		program = own // a script's own version of it
	}
	x := exec.Command(program, body.Args...)
	x.Dir = c.record.WorkDir
	x.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	for k, v := range body.Env {
		x.Env = append(x.Env, k+"="+v)
	}
	x.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	x.Stdout, x.Stderr = c.writer(cloche.Stdout), c.writer(cloche.Stderr)
	x.WaitDelay = 100 * time.Millisecond
	in, _ := x.StdinPipe()
	if err := x.Start(); err != nil {
		c.add(cloche.Stderr, []byte(body.Command+": not found\n"))
		c.end(127, 0, "")
		return c
	}
	c.process = x.Process
	f.running.Go(func() {
		if stdin != nil {
			go func() { _, _ = io.Copy(in, stdin); in.Close() }()
		} else {
			in.Close()
		}
		cause := cloche.ExitCause("")
		if body.Timeout > 0 {
			cause = cloche.CauseTimeout
			t := time.AfterFunc(body.Timeout.Duration(), func() { c.signal(syscall.SIGKILL) })
			defer t.Stop()
		}
		_ = x.Wait()
		status := x.ProcessState.Sys().(syscall.WaitStatus)
		if status.Signaled() {
			c.end(128+int(status.Signal()), int(status.Signal()), cause)
			return
		}
		c.end(status.ExitStatus(), 0, "")
	})
	return c
}

func fileExists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func (c *fakeCommand) writer(s cloche.Stream) io.Writer {
	return writerFunc(func(p []byte) (int, error) { c.add(s, p); return len(p), nil })
}

func (c *fakeCommand) add(s cloche.Stream, p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = append(c.log, cloche.LogEntry{Stream: s, Data: slices.Clone(p)})
	c.changed.Broadcast()
}

func (c *fakeCommand) end(code, signal int, cause cloche.ExitCause) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.ExitCode, c.record.Signal, c.record.Cause = &code, signal, cause
	c.done = true
	c.changed.Broadcast()
}

func (c *fakeCommand) signal(s syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.done && c.process != nil {
		_ = syscall.Kill(-c.process.Pid, s)
	}
}

func (c *fakeCommand) snapshot() client.Command {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.record
}

func (f *fake) ps(w http.ResponseWriter, r *http.Request) {
	if box := f.box(w, r); box != nil {
		list := []client.Command{}
		for _, c := range box.commands {
			list = append(list, c.snapshot())
		}
		answer(w, map[string]any{"commands": list})
	}
}

// find finds a command, or answers.
func (f *fake) find(w http.ResponseWriter, r *http.Request) *fakeCommand {
	box := f.box(w, r)
	if box == nil {
		return nil
	}
	for _, c := range box.commands {
		if string(c.snapshot().ID) == r.PathValue("cid") {
			return c
		}
	}
	refuse(w, http.StatusNotFound, cloche.CodeNotFound, "no such command")
	return nil
}

func (f *fake) command(w http.ResponseWriter, r *http.Request) {
	if c := f.find(w, r); c != nil {
		answer(w, map[string]any{"command": c.snapshot()})
	}
}

func (f *fake) logs(w http.ResponseWriter, r *http.Request) {
	c := f.find(w, r)
	if c == nil {
		return
	}
	w.Header().Set("Content-Type", frames.MediaType)
	c.followLog(r, w)
}

// followLog is follow, but a reader that goes away kills nothing.
func (c *fakeCommand) followLog(r *http.Request, w http.ResponseWriter) {
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-r.Context().Done():
			c.mu.Lock()
			c.changed.Broadcast()
			c.mu.Unlock()
		case <-stop:
		}
	}()
	c.mu.Lock()
	cut := len(c.log)
	c.mu.Unlock()
	if r.FormValue("follow") != "false" {
		cut = math.MaxInt
	}
	for i := 0; ; i++ {
		c.mu.Lock()
		for i >= len(c.log) && i < cut && !c.done && r.Context().Err() == nil {
			c.changed.Wait()
		}
		if i >= min(len(c.log), cut) {
			c.mu.Unlock()
			_, _ = w.Write(frames.Append(nil, frames.End, nil))
			return
		}
		e := c.log[i]
		c.mu.Unlock()
		kind := frames.Stdout
		if e.Stream == cloche.Stderr {
			kind = frames.Stderr
		}
		_, _ = w.Write(frames.Append(nil, kind, e.Data))
		_ = http.NewResponseController(w).Flush()
	}
}

func (f *fake) kill(w http.ResponseWriter, r *http.Request) {
	var body struct{ Signal int }
	_ = json.NewDecoder(r.Body).Decode(&body)
	if c := f.find(w, r); c != nil {
		c.signal(syscall.Signal(body.Signal))
		answer(w, map[string]any{"command": c.snapshot()})
	}
}

func (f *fake) write(w http.ResponseWriter, r *http.Request) {
	if f.box(w, r) == nil {
		return
	}
	err := untar(tar.NewReader(r.Body), r.Header.Get("X-Cwd"))
	_, drained := io.Copy(io.Discard, r.Body)
	if err = errors.Join(err, drained); err != nil {
		refuse(w, http.StatusBadRequest, cloche.CodeInvalid, err.Error())
		return
	}
	answer(w, struct{}{})
}

func untar(tr *tar.Reader, dir string) error {
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		p := filepath.Join(dir, h.Name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(p, fs.FileMode(h.Mode).Perm())
		case tar.TypeSymlink:
			return errors.New("a link in the archive is neither a file nor a directory")
		default:
			var f *os.File
			if f, err = os.OpenFile(p, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, fs.FileMode(h.Mode).Perm()); err == nil {
				_, err = io.Copy(f, tr)
				err = errors.Join(err, f.Close())
			}
		}
		if err != nil {
			return err
		}
	}
}

func (f *fake) read(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Path      string
		PathBytes []byte
	}
	_ = json.NewDecoder(r.Body).Decode(&body)
	box := f.box(w, r)
	if box == nil {
		return
	}
	if len(body.PathBytes) > 0 {
		body.Path = string(body.PathBytes)
	}
	if !filepath.IsAbs(body.Path) {
		body.Path = filepath.Join(box.view.Session.WorkDir, body.Path)
	}
	info, err := os.Stat(body.Path)
	switch {
	case err != nil:
		refuse(w, http.StatusNotFound, cloche.CodeNotFound, "no such file")
		return
	case info.IsDir():
		refuse(w, http.StatusBadRequest, cloche.CodeInvalid, "it is a directory")
		return
	}
	data, _ := os.ReadFile(body.Path)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Cloche-Mode", "755")
	if strings.HasSuffix(body.Path, "fake-cut") {
		_, _ = w.Write(data[:len(data)/2])
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(data)
}
