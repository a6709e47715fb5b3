package control

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cloche-dev/cloche"
)

// checkCreate fills the defaults in and refuses what can never succeed.
func (c *Control) checkCreate(r *cloche.CreateSandbox) error {
	if r.Name != "" {
		if err := cloche.CheckName(r.Name); err != nil {
			return err
		}
	}
	if r.Runtime != "" && r.Image != "" {
		return cloche.Errorf(cloche.CodeInvalid, "a sandbox has a runtime or an image, not both")
	}
	r.VCPUs = orDefault(r.VCPUs, min(cloche.DefaultVCPUs, c.cfg.MaxVCPUs))
	r.Timeout = orDefault(r.Timeout, min(cloche.DefaultTimeout, c.cfg.MaxTimeout))
	checks := []error{
		c.checkVCPUs(r.VCPUs), c.checkTimeout(r.Timeout), checkPorts(r.Ports), checkTags(r.Tags), checkRegion(r.Region), checkEnv(r.Env),
	}
	for _, err := range checks {
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *Control) checkVCPUs(n int) error {
	if n < 1 || n > c.cfg.MaxVCPUs {
		return cloche.Errorf(cloche.CodeInvalid, "a sandbox has 1 to %d vCPUs", c.cfg.MaxVCPUs)
	}
	return nil
}

func (c *Control) checkTimeout(d time.Duration) error {
	if d < cloche.MinTimeout || d > c.cfg.MaxTimeout {
		return cloche.Errorf(cloche.CodeTimeoutInvalid, "a timeout is between %s and %s", cloche.MinTimeout, c.cfg.MaxTimeout)
	}
	return nil
}

func checkPorts(ports []int) error {
	if len(ports) > cloche.MaxPorts {
		return cloche.Errorf(cloche.CodeInvalid, "a sandbox has at most %d ports", cloche.MaxPorts)
	}
	seen := make(map[int]bool, len(ports))
	for _, p := range ports {
		if p < 1 || p > 65535 {
			return cloche.Errorf(cloche.CodeInvalid, "a port is between 1 and 65535, unlike %d", p)
		}
		if seen[p] {
			return cloche.Errorf(cloche.CodeInvalid, "the port %d is there twice", p)
		}
		seen[p] = true
	}
	return nil
}

func checkTags(tags map[string]string) error {
	if len(tags) > cloche.MaxTags {
		return cloche.Errorf(cloche.CodeInvalid, "a sandbox has at most %d tags", cloche.MaxTags)
	}
	for k, v := range tags {
		if k == "" || len(k) > cloche.MaxTagLen || len(v) > cloche.MaxTagLen || !text(k) || !text(v) {
			return cloche.Errorf(cloche.CodeInvalid, "a tag has a key, and key and value have at most %d bytes of UTF-8 each", cloche.MaxTagLen)
		}
	}
	return nil
}

// maxRegionLen is far above the longest that the protocol knows.
const maxRegionLen = 64

func checkRegion(region string) error {
	if len(region) > maxRegionLen || !text(region) {
		return cloche.Errorf(cloche.CodeInvalid, "a region has at most %d bytes of UTF-8", maxRegionLen)
	}
	return nil
}

func checkEnv(env map[string]string) error {
	for k, v := range env {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return cloche.Errorf(cloche.CodeInvalid, "the environment is not valid UTF-8")
		}
	}
	return cloche.CheckEnv(env)
}

// text reports whether s is UTF-8 without NUL.
func text(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// checkPath refuses what no path can be. what is the word for it.
func checkPath(what, path string) error {
	if len(path) > cloche.MaxPathLen {
		return cloche.Errorf(cloche.CodeInvalid, "the %s has %d bytes; at most %d are possible", what, len(path), cloche.MaxPathLen)
	}
	if strings.ContainsRune(path, 0) {
		return cloche.Errorf(cloche.CodeInvalid, "the %s has a NUL byte", what)
	}
	return nil
}
