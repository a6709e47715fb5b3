package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/control"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/node"
)

// config is the configuration file. Zero values take the defaults said here; an
// unknown key is an error, so that a typing mistake is not a silent default.
type config struct {
	// MaxTimeout bounds the total lifetime of a session: "24h". At most 24 h.
	MaxTimeout duration `toml:"max_timeout"`
	// MaxVCPUs bounds the vCPUs of one sandbox: 32. More than the host has is
	// allowed; it cannot use more than there is.
	MaxVCPUs int `toml:"max_vcpus"`
	// MaxSessions bounds the live sessions on this host: 500.
	MaxSessions int `toml:"max_sessions"`
	// MaxLogBytes bounds the output kept for one command: 256 MiB.
	MaxLogBytes int64 `toml:"max_log_bytes"`
	// MaxPIDs bounds processes and threads of one sandbox: 4096.
	MaxPIDs int `toml:"max_pids"`
	// MinFreeBytes and MinFreePercent are what must be free of the data
	// directory's file system for a sandbox to be started: 1 GiB and 5.
	// Sandboxes that run go on.
	MinFreeBytes   int64 `toml:"min_free_bytes"`
	MinFreePercent int   `toml:"min_free_percent"`
	// StopGrace is between SIGTERM and SIGKILL when a sandbox stops: "5s".
	StopGrace duration `toml:"stop_grace"`
}

// duration is a time.Duration written as "90s", "5m", "24h".
type duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = duration(v)
	return err
}

// readConfig reads the file, "" for none, and fills in the defaults.
func readConfig(path string) (config, error) {
	c := config{
		MaxTimeout: duration(cloche.MaxTimeout), MaxVCPUs: cloche.MaxVCPUs, MaxSessions: 500,
		MaxLogBytes: cloche.MaxLogLen, MaxPIDs: node.DefaultPIDs,
		MinFreeBytes: 1 << 30, MinFreePercent: 5, StopGrace: duration(5 * time.Second),
	}
	if path == "" {
		return c, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return c, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close() // opened for reading: nothing to lose
	if err := toml.NewDecoder(f).DisallowUnknownFields().Decode(&c); err != nil {
		var strict *toml.StrictMissingError
		if errors.As(err, &strict) {
			return c, fmt.Errorf("configuration %s has unknown keys:\n%s", path, strict.String())
		}
		var at *toml.DecodeError
		if errors.As(err, &at) {
			return c, fmt.Errorf("configuration %s: %w\n%s", path, err, at.String()) // the lines around it
		}
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, c.check()
}

func (c config) check() error {
	switch {
	case c.MaxTimeout < duration(cloche.MinTimeout) || c.MaxTimeout > duration(cloche.MaxTimeout):
		return fmt.Errorf("configuration: max_timeout is between %s and %s", cloche.MinTimeout, cloche.MaxTimeout)
	case c.MaxVCPUs < 1 || c.MaxVCPUs > cloche.MaxVCPUs:
		return fmt.Errorf("configuration: max_vcpus is between 1 and %d", cloche.MaxVCPUs)
	case c.MaxSessions < 1, c.MaxLogBytes < 1, c.MaxPIDs < 64:
		return errors.New("configuration: max_sessions and max_log_bytes are at least 1, max_pids at least 64")
	case c.MinFreeBytes < 1 || c.MinFreePercent < 0 || c.MinFreePercent > 99:
		return errors.New("configuration: min_free_bytes is at least 1, min_free_percent between 0 and 99")
	case c.StopGrace < duration(time.Millisecond) || c.StopGrace > duration(time.Minute):
		return errors.New("configuration: stop_grace is between 1ms and 1m")
	}
	return nil
}

// control is the configuration of the control package.
func (c config) control(dir dataDir, d driver.Driver, log *slog.Logger) control.Config {
	return control.Config{
		MaxTimeout: time.Duration(c.MaxTimeout), MaxVCPUs: min(c.MaxVCPUs, d.Capabilities().MaxVCPUs),
		MaxSessions: c.MaxSessions, StopGrace: time.Duration(c.StopGrace),
		Disk: dir.disk, MinFreeBytes: c.MinFreeBytes, MinFreePercent: c.MinFreePercent, Log: log,
	}
}
