package image

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// aptSource is one place that apt gets packages from.
type aptSource struct {
	uri        string
	suite      string
	components []string
}

// mirrors are the bases of the archives that a build uses.
type mirrors struct {
	main     string
	security string // "" = without security updates
}

// debianReleases are the names by which a host's sources may speak of Debian's
// archive. Other archives copy Debian's file format, not these together with
// the component main; the signature decides in the end.
var debianReleases = []string{"bullseye", "bookworm", "trixie", "forky", "sid",
	"stable", "oldstable", "testing", "unstable"}

// hostMirrors finds the archives of Debian in apt's configuration directory,
// and fills what is missing from fallback.
func hostMirrors(etcApt string, fallback mirrors) (mirrors, error) {
	files, err := filepath.Glob(filepath.Join(etcApt, "sources.list.d", "*"))
	if err != nil {
		return mirrors{}, fmt.Errorf("apt sources: %w", err)
	}
	var all []aptSource
	for _, f := range append([]string{filepath.Join(etcApt, "sources.list")}, files...) {
		b, err := os.ReadFile(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return mirrors{}, fmt.Errorf("apt sources: %w", err)
		}
		switch filepath.Ext(f) {
		case ".list":
			all = append(all, parseList(string(b))...)
		case ".sources":
			all = append(all, parseSources(string(b))...)
		}
	}
	m := pickMirrors(all)
	if m.main == "" {
		return fallback, nil
	}
	m.security = cmp.Or(m.security, fallback.security)
	return m, nil
}

// pickMirrors takes the first archive of each kind.
func pickMirrors(all []aptSource) mirrors {
	var m mirrors
	for _, s := range all {
		uri := expandMirror(s.uri)
		if uri == "" || !slices.Contains(s.components, "main") {
			continue
		}
		release, rest, _ := strings.Cut(strings.ReplaceAll(s.suite, "/", "-"), "-")
		if !slices.Contains(debianReleases, release) {
			continue
		}
		switch rest {
		case "":
			m.main = cmp.Or(m.main, uri)
		case "security":
			m.security = cmp.Or(m.security, uri)
		}
	}
	return m
}

// expandMirror returns a URI that can be fetched from, "" for media. A
// "mirror+file:" names a file with one URI a line (apt-transport-mirror(1)),
// which Debian's cloud images use.
func expandMirror(uri string) string {
	uri = strings.TrimSuffix(uri, "/")
	if strings.HasPrefix(uri, "http://") || strings.HasPrefix(uri, "https://") {
		return uri
	}
	rest, ok := strings.CutPrefix(uri, "mirror+file:")
	if !ok {
		return ""
	}
	b, err := os.ReadFile(filepath.Clean("/" + strings.TrimLeft(rest, "/")))
	if err != nil {
		return "" // the fallback is better than no image
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && strings.HasPrefix(f[0], "http") {
			return strings.TrimSuffix(f[0], "/")
		}
	}
	return ""
}

// parseList reads the one-line format of sources.list(5). Lines that it does
// not understand are left out, as those of other types are.
func parseList(text string) []aptSource {
	var out []aptSource
	sc := bufio.NewScanner(strings.NewReader(text))
	for sc.Scan() {
		line, _, _ := strings.Cut(sc.Text(), "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb")
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '\t' {
			continue
		}
		rest = strings.TrimSpace(rest)
		if strings.HasPrefix(rest, "[") {
			_, rest, ok = strings.Cut(rest, "]")
			if !ok {
				continue
			}
		}
		f := strings.Fields(rest)
		if len(f) < 2 {
			continue
		}
		out = append(out, aptSource{uri: f[0], suite: strings.Trim(f[1], "/"), components: f[2:]})
	}
	return out
}

// parseSources reads the deb822 format of sources.list(5).
func parseSources(text string) []aptSource {
	var out []aptSource
	fields := map[string]string{}
	last := ""
	flush := func() {
		if slices.Contains(strings.Fields(fields["types"]), "deb") && !disabled(fields["enabled"]) {
			for _, uri := range strings.Fields(fields["uris"]) {
				for _, suite := range strings.Fields(fields["suites"]) {
					out = append(out, aptSource{uri, strings.Trim(suite, "/"), strings.Fields(fields["components"])})
				}
			}
		}
		clear(fields)
		last = ""
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \t\r\n")
		switch {
		case line == "":
			flush()
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			fields[last] += " " + strings.TrimSpace(line)
		default:
			key, value, _ := strings.Cut(line, ":")
			last = strings.ToLower(strings.TrimSpace(key))
			fields[last] = strings.TrimSpace(value)
		}
	}
	flush()
	return out
}

// disabled is apt's way to read a boolean that is not true.
func disabled(v string) bool {
	return slices.Contains([]string{"no", "false", "without", "off", "disable", "0"}, strings.ToLower(v))
}
