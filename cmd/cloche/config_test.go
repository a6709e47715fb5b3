package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/node"
)

func configFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cloche.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestConfigDefaults: no file, an empty one, and one that sets a single value
// leave the rest as the fields' comments say.
func TestConfigDefaults(t *testing.T) {
	want := config{
		MaxTimeout: duration(24 * time.Hour), MaxVCPUs: 32, MaxSessions: 500, MaxLogBytes: 256 << 20,
		MaxPIDs: 4096, MinFreeBytes: 1 << 30, MinFreePercent: 5, StopGrace: duration(5 * time.Second),
	}
	if node.DefaultPIDs != want.MaxPIDs || cloche.MaxVCPUs != want.MaxVCPUs {
		t.Error("the comments of config are out of date")
	}
	for _, path := range []string{"", configFile(t, ""), configFile(t, "# nothing\n")} {
		if got, err := readConfig(path); got != want || err != nil {
			t.Errorf("%q: %+v, %v", path, got, err)
		}
	}
	want.MaxTimeout, want.MinFreePercent = duration(90*time.Minute), 0
	if got, err := readConfig(configFile(t, "max_timeout = \"1h30m\"\nmin_free_percent = 0\n")); got != want || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestConfigMistakes: every mistake is an error that names its place.
func TestConfigMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"max_timout = \"1h\"":                 "max_timout",
		"[limits]\nmax_pids = 100":            "limits",
		"max_timeout = 60":                    "max_timeout",
		"max_timeout = \"soon\"":              "max_timeout",
		"max_timeout = \"25h\"":               "max_timeout",
		"max_timeout = \"-1h\"":               "max_timeout",
		"max_timeout = \"0s\"":                "max_timeout",
		"max_vcpus = 0":                       "max_vcpus",
		"max_vcpus = 33":                      "max_vcpus",
		"max_vcpus = \"many\"":                "max_vcpus",
		"max_sessions = 0":                    "max_sessions",
		"max_log_bytes = -1":                  "max_log_bytes",
		"max_pids = 63":                       "max_pids",
		"min_free_bytes = 0":                  "min_free_bytes",
		"min_free_percent = 100":              "min_free_percent",
		"min_free_percent = -1":               "min_free_percent",
		"stop_grace = \"0s\"":                 "stop_grace",
		"stop_grace = \"61s\"":                "stop_grace",
		"max_sessions = 99999999999999999999": "max_sessions",
		"not toml":                            "toml",
	} {
		path := configFile(t, text)
		if _, err := readConfig(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "configuration") {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := readConfig(filepath.Join(t.TempDir(), "none.toml")); err == nil || !strings.Contains(err.Error(), "none.toml") {
		t.Errorf("a file that is not there: %v", err)
	}
}
