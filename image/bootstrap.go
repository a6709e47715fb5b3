package image

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/cloche-dev/cloche"
)

const (
	aptHelper     = "/usr/lib/apt/apt-helper"
	debianKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// needTools fails unless this host can make a Debian root file system.
func needTools() error {
	for _, t := range []struct{ file, pkg string }{
		{"mmdebstrap", "mmdebstrap"}, {"unshare", "util-linux"}, {"apt-get", ""}, {"apt-config", ""}, {aptHelper, ""}, {debianKeyring, "debian-archive-keyring"},
	} {
		_, err := exec.LookPath(t.file)
		if strings.HasPrefix(t.file, "/") {
			_, err = os.Stat(t.file)
		}
		switch {
		case err == nil:
		case t.pkg == "":
			return cloche.Errorf(cloche.CodeUnavailable,
				"%s is missing: an image is built on a Debian or Ubuntu host; `cloche image pull` works on any", path.Base(t.file))
		default:
			return cloche.Errorf(cloche.CodeUnavailable,
				"%s is missing: run `apt-get install %s` (`cloche doctor` lists all that is needed)", path.Base(t.file), t.pkg)
		}
	}
	return nil
}

// debian makes Debian root file systems with the host's apt, in a scratch
// directory. Packages are fetched as the host's apt is set up to, proxies and
// credentials included.
type debian struct {
	dir     string // scratch
	debs    string // cache of packages
	mirrors mirrors
	suite   string
	acquire []string // lines of apt.conf about downloading, from the host's
	lock    *os.File // of the cache
	p       Progress
}

// acquireKeep selects what of the host's apt settings matters for downloading.
var acquireKeep = regexp.MustCompile(`^Acquire::(http|https|Check-[A-Za-z-]+|Retries|ForceIPv[46]|Proxy[A-Za-z-]*)(::[^ ]*)? "[^"]+";$`)

// hostAcquire reads the host's apt settings for downloads.
func hostAcquire(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	if err != nil {
		return nil, fmt.Errorf("apt configuration: %w", err)
	}
	lines := []string{`Acquire::Retries "3";`} // unless the host says otherwise
	for line := range strings.Lines(string(out)) {
		if line = strings.TrimSpace(line); acquireKeep.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// pickSuite sets the first release that the mirror has.
func (d *debian) pickSuite(ctx context.Context, suites []string) error {
	m := d.p.begin("find Debian release", 0)
	var errs []error
	for _, s := range suites {
		m.detail(s)
		err := d.hasSuite(ctx, d.mirrors.main, s)
		if err == nil {
			d.suite = s
			break
		}
		errs = append(errs, fmt.Errorf("%s: %w", s, err))
	}
	if d.suite == "" {
		return &cloche.Error{Code: cloche.CodeUnavailable, Op: "find Debian release", Err: errors.Join(errs...),
			Message: "the Debian mirror of this host's apt sources cannot be reached or has none of " + strings.Join(suites, ", ")}
	}
	if d.mirrors.security != "" && d.hasSuite(ctx, d.mirrors.security, d.suite+"-security") != nil {
		d.mirrors.security = "" // a mirror may be without; the image's own sources are not
	}
	m.end()
	return nil
}

// hasSuite downloads the release file as the host's apt would, and looks whose
// archive it is. mmdebstrap checks the signature later.
func (d *debian) hasSuite(ctx context.Context, mirror, suite string) error {
	to := filepath.Join(d.dir, "InRelease")
	cmd := exec.CommandContext(ctx, aptHelper, "download-file", mirror+"/dists/"+suite+"/InRelease", to)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLines(string(out)))
	}
	b, err := os.ReadFile(to)
	if err = errors.Join(err, os.Remove(to)); err != nil {
		return err
	}
	if !regexp.MustCompile(`(?m)^Origin: Debian$`).Match(b) {
		return fmt.Errorf("not an archive of Debian's")
	}
	return nil
}

// sources are the lines of sources.list for the build.
func (d *debian) sources() []string {
	line := func(uri, suite string) string {
		return fmt.Sprintf("deb [signed-by=%s] %s %s main", debianKeyring, uri, suite)
	}
	lines := []string{line(d.mirrors.main, d.suite), line(d.mirrors.main, d.suite+"-updates")}
	if d.mirrors.security != "" {
		lines = append(lines, line(d.mirrors.security, d.suite+"-security"))
	}
	return lines
}

// aptGet runs apt-get with a state of its own that knows of no installed
// package, so that it downloads everything that a new system needs.
func (d *debian) aptGet(ctx context.Context, archives string, args ...string) *exec.Cmd {
	base := []string{"-q", "-y", "-o", "Dir::Cache::archives=" + archives}
	cmd := exec.CommandContext(ctx, "apt-get", append(base, args...)...)
	cmd.Env = append(os.Environ(), "APT_CONFIG="+filepath.Join(d.dir, "apt.conf"), "LC_ALL=C.UTF-8")
	return cmd
}

func (d *debian) writeAptConfig() error {
	lines := append([]string{
		fmt.Sprintf("Dir::State %q;", filepath.Join(d.dir, "state")),
		fmt.Sprintf("Dir::State::status %q;", filepath.Join(d.dir, "status")),
		fmt.Sprintf("Dir::State::lists %q;", filepath.Join(d.debs, "lists")),
		fmt.Sprintf("Dir::Cache %q;", filepath.Join(d.dir, "cache")),
		fmt.Sprintf("Dir::Etc::sourcelist %q;", filepath.Join(d.dir, "sources.list")),
		`Dir::Etc::sourceparts "/dev/null"; Dir::Etc::main "/dev/null"; Dir::Etc::parts "/dev/null";`,
		`Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null";`,
		`APT::Architecture "amd64"; APT::Architectures "amd64"; APT::Install-Recommends "false";`,
		`APT::Sandbox::User "root"; Acquire::Languages "none"; Debug::NoLocking "true";`,
	}, d.acquire...)
	for _, sub := range []string{"state", "cache", "empty/partial"} {
		if err := os.MkdirAll(filepath.Join(d.dir, sub), 0o755); err != nil {
			return hostError("apt directory", err)
		}
	}
	for _, sub := range []string{"lists/partial", "archives/partial"} {
		if err := os.MkdirAll(filepath.Join(d.debs, sub), 0o755); err != nil {
			return hostError("apt directory", err)
		}
	}
	for name, text := range map[string]string{
		"apt.conf": strings.Join(lines, "\n") + "\n", "status": "", "sources.list": strings.Join(d.sources(), "\n") + "\n",
	} {
		if err := os.WriteFile(filepath.Join(d.dir, name), []byte(text), 0o644); err != nil {
			return hostError("apt configuration", err)
		}
	}
	return nil
}

// fetchPackages downloads every package of the system into the cache, where an
// interrupted build finds them again, and returns their file names.
func (d *debian) fetchPackages(ctx context.Context, packages []string) ([]string, error) {
	if err := d.writeAptConfig(); err != nil {
		return nil, err
	}
	m := d.p.begin("download package lists", 0)
	archives := filepath.Join(d.debs, "archives")
	if err := runTool(ctx, d.aptGet(ctx, archives, "update", "-o", "APT::Update::Error-Mode=any"), nil); err != nil {
		return nil, err
	}
	m.end()
	// What mmdebstrap's variant minbase installs, and the recipe's.
	want := append([]string{"install", "?essential", "?priority(required)", "apt"}, packages...)
	out, err := d.aptGet(ctx, filepath.Join(d.dir, "empty"), append([]string{"--print-uris"}, want...)...).Output()
	if err != nil {
		return nil, toolError("apt-get --print-uris", err, stderrOf(err))
	}
	files, total := parseURIs(string(out))
	m = d.p.begin("download packages", total)
	done := make(chan error, 1)
	go func() {
		done <- runTool(ctx, d.aptGet(ctx, archives, append([]string{"--download-only"}, want...)...), nil)
	}()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			if err != nil {
				return nil, err
			}
			m.end()
			return files, nil
		case <-tick.C:
			m.set(sizeOf(archives, files))
		}
	}
}

// parseURIs reads the output of apt-get --print-uris: 'URI' FILE SIZE HASH.
func parseURIs(out string) (files []string, total int64) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 3 || !strings.HasPrefix(f[0], "'") {
			continue
		}
		size, err := strconv.ParseInt(f[2], 10, 64)
		if err != nil || f[1] != filepath.Base(f[1]) {
			continue
		}
		files = append(files, f[1])
		total += size
	}
	return files, total
}

// sizeOf adds up what is there of the files, the partial one included.
func sizeOf(archives string, files []string) int64 {
	var n int64
	for _, f := range files {
		info, err := os.Stat(filepath.Join(archives, f))
		if errors.Is(err, fs.ErrNotExist) {
			info, err = os.Stat(filepath.Join(archives, "partial", f))
		}
		if err == nil {
			n += info.Size()
		}
	}
	return n
}

// bootstrap makes the root file system and writes it as a zstd-compressed tar to
// out. stage holds the files that are copied over the packages', setup is the
// script that runs inside after that.
func (d *debian) bootstrap(ctx context.Context, r *recipe, files []string, stage string, setup []byte, out io.Writer) error {
	list, script, conf := filepath.Join(d.dir, "files"), filepath.Join(d.dir, "setup.sh"), filepath.Join(d.dir, "acquire.conf")
	for name, text := range map[string]string{
		list: strings.Join(files, "\n") + "\n", script: string(setup), conf: strings.Join(d.acquire, "\n") + "\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return hostError("write recipe", err)
		}
	}
	args := []string{"--mode=root", "--variant=minbase", "--format=tar", "--architectures=amd64",
		"--skip=essential/unlink", "--include=" + strings.Join(r.Packages, ","),
		"--aptopt=" + conf, `--aptopt=Acquire::Languages "none"`,
		// The hooks get the new root as $1 (mmdebstrap(1)).
		"--setup-hook=" + shell(`mkdir -p "$1/var/cache/apt/archives" && while read -r f; do cp "%s/$f" "$1/var/cache/apt/archives/"; done <"%s"`, filepath.Join(d.debs, "archives"), list),
		"--customize-hook=" + shell(`cp -a "%s/." "$1/"`, stage),
		"--customize-hook=" + shell(`chroot "$1" /bin/sh -s <"%s"`, script),
	}
	for _, x := range r.Excludes {
		args = append(args, "--dpkgopt=path-exclude="+x)
	}
	for _, x := range r.Includes {
		args = append(args, "--dpkgopt=path-include="+x)
	}
	args = append(append(args, d.suite, "-"), d.sources()...)
	// In name spaces of its own: killing unshare takes all processes and all
	// mounts of the new root with it (mmdebstrap alone leaves /proc and /sys
	// mounted when it is killed), and nothing of them is ever seen outside. The
	// modes of a root file system must not depend on our umask.
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
		"/bin/sh", "-c", `umask 022 && exec mmdebstrap "$@"`, "mmdebstrap"}, args...)...)
	// An orphan of a killed build keeps the next one waiting.
	cmd.ExtraFiles = []*os.File{d.lock}
	cmd.Env = append(os.Environ(), "TMPDIR="+d.dir, "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive")
	z, err := zstd.NewWriter(out, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(2))
	if err != nil {
		return fmt.Errorf("compress image: %w", err)
	}
	m := d.p.begin("install packages", 0)
	cmd.Stdout = io.MultiWriter(z, meterWriter{m})
	err = runTool(ctx, cmd, func(line string) { // mmdebstrap's words
		if text, ok := strings.CutPrefix(line, "I: "); ok && !strings.Contains(text, "hook") {
			text, _, _ = strings.Cut(text, "...")
			m.detail(text)
		}
	})
	if err = errors.Join(err, z.Close()); err != nil {
		return err
	}
	m.end()
	return nil
}

// shell puts paths into a command. They are ours and have no quotes, which
// makeProduct made sure of.
func shell(format string, paths ...any) string { return fmt.Sprintf(format, paths...) }

// runTool runs a command that says what it does on standard error (and output,
// if cmd has none set), and gives its last words with an error.
func runTool(ctx context.Context, cmd *exec.Cmd, line func(string)) error {
	pr, pw, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("run %s: %w", filepath.Base(cmd.Path), err)
	}
	cmd.Stderr = pw
	if cmd.Stdout == nil {
		cmd.Stdout = pw
	}
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("run %s: %w", filepath.Base(cmd.Path), err), pr.Close(), pw.Close())
	}
	read := make(chan string, 1)
	go func() {
		tail := ""
		sc := bufio.NewScanner(pr)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			if line != nil {
				line(sc.Text())
			}
			tail = lastLines(tail + "\n" + sc.Text())
		}
		_, _ = io.Copy(io.Discard, pr) // an over-long line must not block the command
		read <- tail
	}()
	err = cmd.Wait()
	if ctx.Err() != nil { // said in our words, not the tool's
		err = ctx.Err()
	}
	cerr := pw.Close()
	// A grandchild that outlives the command may hold the pipe open.
	cerr = errors.Join(cerr, pr.SetReadDeadline(time.Now().Add(2*time.Second)))
	tail := <-read
	err = errors.Join(err, cerr, pr.Close())
	if err != nil && ctx.Err() == nil {
		return toolError(filepath.Base(cmd.Path), err, tail)
	}
	return err
}

func toolError(tool string, err error, tail string) error {
	if errors.Is(err, exec.ErrNotFound) {
		return cloche.Errorf(cloche.CodeUnavailable, "%s is missing on this host", tool)
	}
	return &cloche.Error{Code: cloche.CodeUnavailable, Op: "run " + tool, Err: err,
		Message: fmt.Sprintf("%s could not do its work; its last words:\n%s", tool, tail)}
}

func stderrOf(err error) string {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return lastLines(string(exit.Stderr))
	}
	return ""
}

// lastLines keeps the end of a tool's output, for people.
func lastLines(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}
