package image

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
)

// inSandbox runs a command in a copy-on-write view of the tree, as root in name
// spaces of its own, with the image's environment. It is what a sandbox sees,
// without the sandbox.
const inSandbox = `set -e
mount --make-rprivate /
hostname sandbox
mount -t tmpfs tmpfs "$2"
mkdir "$2/up" "$2/work" "$2/root"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/up,workdir=$2/work" "$2/root"
mount -t proc proc "$2/root/proc"
mount -t tmpfs tmpfs "$2/root/dev"
for n in "null 3" "zero 5" "random 8" "urandom 9"; do mknod -m 666 "$2/root/dev/${n% *}" c 1 "${n#* }"; done
mkdir -m 1777 "$2/root/dev/shm"
exec chroot "$2/root" /usr/bin/env -i HOME=/root "$3" "$4" /bin/sh -c "$5" </dev/null 2>&1
`

// TestUniversal builds the default image (within seconds if the cache has it,
// else from Debian's and npm's packages) and tries what it promises.
func TestUniversal(t *testing.T) {
	asRoot(t)
	if testing.Short() {
		t.Skip("a large one")
	}
	l, _ := newLibrary(t)
	start := time.Now()
	o := BuildOptions{CacheDir: os.Getenv("CLOCHE_CACHE")}
	img, err := l.Build(t.Context(), "universal", o, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("built in %v: %d files, %d bytes, %s", time.Since(start), img.Files, img.SizeBytes, img.Digest)
	if img.Name != cloche.DefaultImage || img.SizeBytes > 700<<20 || img.SizeBytes < 100<<20 {
		t.Errorf("image %q has %d bytes; want universal with at most 700 MiB", img.Name, img.SizeBytes)
	}
	again, err := l.Build(t.Context(), "universal", o, nil)
	if err != nil || again.ID != img.ID {
		t.Errorf("second build: %s, %v; want the same image", again.ID, err)
	}
	checkUniversalConfig(t, img.Config)
	t.Run("inside", func(t *testing.T) {
		for name, c := range universalChecks {
			t.Run(name, func(t *testing.T) { checkInside(t, l.treePath(img.ID), img.Config, c) })
		}
	})
	t.Run("leftovers", func(t *testing.T) { checkLeftovers(t, l.treePath(img.ID)) })
	// P11: what ran inside has not changed the image.
	if err := l.Verify(t.Context(), img.ID); err != nil {
		t.Error(err)
	}
}

func checkUniversalConfig(t *testing.T, c cloche.ImageConfig) {
	t.Helper()
	if c.User != "ubuntu" || c.WorkDir != cloche.DefaultWorkDir || c.Env["LANG"] != "C.UTF-8" ||
		!strings.HasPrefix(c.Env["PATH"], "/vercel/bin:/vercel/runtimes/node24/bin:") {
		t.Errorf("configuration is %+v", c)
	}
	have := slices.Sorted(maps.Keys(c.Runtimes))
	if !slices.Equal(have, []string{"node22", "node24", "python3.13"}) && !slices.Equal(have, []string{"node22", "node24"}) {
		t.Errorf("runtimes are %q", have)
	}
	for name, r := range c.Runtimes {
		if r.User != "vercel-sandbox" || !filepath.IsAbs(r.Path) {
			t.Errorf("runtime %s is %+v", name, r)
		}
	}
}

type check struct{ command, want string } // want is a regular expression

// universalChecks are the promises of wire spec 8.5, 8.6 and 9.2.
var universalChecks = map[string]check{
	"tools": {`for t in sh bash sudo env id useradd usermod groupadd gpasswd chown chmod mkdir base64 find ls stat rm rmdir mv cp test ln readlink realpath truncate mktemp ` +
		`git curl tar gzip xz unzip less jq ps python3 pip python node npm npx ssh visudo apt-get; do command -v $t >/dev/null || echo missing $t; done; echo end`, `^end$`},
	"node 24 by default": {`node -v`, `^v24\.`},
	"npm of node 24":     {`npm -v`, `^11\.`},
	"node 22":            {`PATH=/vercel/runtimes/node22/bin:$PATH; node -v; npm -v`, `^v22\.\S+\n10\.\S+$`},
	"npm prefix":         {`sudo -u vercel-sandbox env npm prefix -g`, `^/vercel$`},
	"python":             {`python -V; /vercel/runtimes/python/bin/python3 -c 'import ssl, sqlite3, venv; print("ok")'`, `^Python 3\.\d+\.\d+\nok$`},
	"venv":               {`python3 -m venv /tmp/v && /tmp/v/bin/pip --version`, `^pip \d`},
	"pip is not blocked": {`pip install --dry-run --no-index nothing-of-this-name; true`, `No matching distribution`},
	"users": {`id ubuntu; id vercel-sandbox; getent passwd ubuntu vercel-sandbox | cut -d: -f3-`,
		`^uid=1000\(ubuntu\) gid=1000\(ubuntu\) groups=1000\(ubuntu\)\nuid=1001\(vercel-sandbox\) gid=1001\(vercel-sandbox\) groups=1001\(vercel-sandbox\),1000\(ubuntu\)\n` +
			`1000:1000::/vercel:/bin/bash\n1001:1001::/home/vercel-sandbox:/bin/bash$`},
	"sudo file":               {`visudo -c`, `/etc/sudoers.d/cloche: parsed OK`},
	"sudo as ubuntu":          {`su ubuntu -c 'sudo -n id -un; sudo -n npm -v'`, `^root\n11\.\S+$`},
	"sudo as vercel-sandbox":  {`su vercel-sandbox -c 'sudo -n -u ubuntu -- bash -c "id -un; cd; pwd"'`, `^ubuntu\n/vercel$`},
	"sudo of a runtime":       {`su vercel-sandbox -c 'PATH=/vercel/runtimes/node22/bin:$PATH PYTHONPATH=/p sudo -n sh -c "node -v; which node; echo \$HOME \$USER \$PYTHONPATH"'`, `^v22\.\S+\n/vercel/runtimes/node22/bin/node\n/root root /p$`},
	"sudo -i":                 {`su ubuntu -c 'sudo -n -i sh -c "pwd; which node; echo \$HOME"'`, `^/root\n/vercel/runtimes/node24/bin/node\n/root$`},
	"working directory":       {`stat -c '%U %a' /vercel/sandbox; su ubuntu -c 'cd /vercel/sandbox && touch a'; su vercel-sandbox -c 'cd /vercel/sandbox && touch b && rm a' && ls /vercel/sandbox`, `^ubuntu 2775\nb$`},
	"users of the SDK":        {`useradd -m -s /bin/bash ada && chown ada:ubuntu /home/ada && chmod 770 /home/ada && groupadd crew && usermod -aG crew ada && gpasswd -d ada crew && id ada; useradd ada; echo $?`, `uid=1002\(ada\)[\s\S]*\n9$`},
	"locale":                  {`locale charmap; python3 -c 'print("\u00e9")'; touch /tmp/é && ls /tmp`, `^UTF-8\né\né$`},
	"English errors":          {`cat /none; mkdir /tmp; rmdir /usr`, `No such file or directory[\s\S]*File exists[\s\S]*not empty`},
	"GNU stat and find":       {`stat -L -c '%s|%f|%u|%g|%X|%Y|%Z|%W|%h|%i|%d|%B|%b' /etc/hosts; find /vercel/runtimes/python/bin -maxdepth 1 -mindepth 1 -printf '%f|%y\n' | sort | head -1`, `^\d+\|81a4\|0\|0\|[\d|]+\npip3\|l$`},
	"login shell":             {`su - ubuntu -c 'command -v node; pwd; echo $LANG'`, `^/vercel/runtimes/node24/bin/node\n/vercel\nC.UTF-8$`},
	"packages are consistent": {`dpkg --audit; apt-get -s install --no-download bash | tail -1; apt-get update --print-uris | grep -c InRelease`, `^0 upgraded, 0 newly installed[\s\S]*\n3$`},
	"host name":               {`getent hosts localhost sandbox; hostname`, `localhost[\s\S]*sandbox\nsandbox$`},
}

func checkInside(t *testing.T, tree string, cfg cloche.ImageConfig, c check) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", inSandbox, "sh",
		tree, t.TempDir(), "PATH="+cfg.Env["PATH"], "LANG="+cfg.Env["LANG"], c.command)
	out, err := cmd.CombinedOutput()
	got := strings.TrimSpace(string(out))
	if !regexp.MustCompile(c.want).MatchString(got) {
		t.Errorf("%s\ngives %q, %v\nwant %s", c.command, got, err, c.want)
	}
}

// checkLeftovers looks for what came from the host that built the image, and for
// what must differ between machines.
func checkLeftovers(t *testing.T, tree string) {
	for _, name := range []string{"etc/machine-id", "etc/resolv.conf"} {
		info, err := os.Lstat(filepath.Join(tree, name))
		if err != nil || info.Size() != 0 {
			t.Errorf("%s is not empty: %v, %v", name, info, err)
		}
	}
	for _, pattern := range []string{"etc/ssh/ssh_host_*", "var/lib/dbus/machine-id", "etc/apt/sources.list", "etc/apt/apt.conf.d/*mmdebstrap*", "etc/dpkg/dpkg.cfg.d/*mmdebstrap*",
		"var/cache/apt/*", "var/lib/apt/lists/*_*", "var/log/*", "tmp/*", "root/.[a-z]*/*", "usr/lib/python3*/EXTERNALLY-MANAGED", "dev/n*", "run/*/*"} {
		found, err := filepath.Glob(filepath.Join(tree, pattern))
		if err != nil || len(found) > 0 {
			t.Errorf("left in the image: %q, %v", found, err)
		}
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"etc/hostname", "etc/hosts"} {
		b, err := os.ReadFile(filepath.Join(tree, file))
		if err != nil || regexp.MustCompile(fmt.Sprintf(`(?m)(^|\s)%s$`, regexp.QuoteMeta(name))).Match(b) && name != "sandbox" {
			t.Errorf("%s names the host: %q, %v", file, b, err)
		}
	}
}
