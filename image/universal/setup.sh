# Runs as root inside the new root file system, after the packages and the
# overlay are in place. What it leaves must not depend on the building host.
set -eu
umask 022

# Users. Both may write what belongs to the platform (/vercel), through group
# ubuntu and set-group-id directories.
useradd --uid 1000 --user-group --no-create-home --home-dir /vercel --shell /bin/bash ubuntu
useradd --uid 1001 --user-group --groups ubuntu --create-home --shell /bin/bash vercel-sandbox
mkdir -p /vercel/bin /vercel/etc /vercel/lib /vercel/sandbox /vercel/runtimes
for f in .bashrc .profile; do cp "/etc/skel/$f" "/vercel/$f"; chown 1000:1000 "/vercel/$f"; done
chown 1000:1000 /vercel /vercel/bin /vercel/etc /vercel/lib /vercel/sandbox
chmod 2775 /vercel /vercel/bin /vercel/etc /vercel/lib /vercel/sandbox
chmod 0440 /etc/sudoers.d/cloche
chmod 0755 /etc/profile.d/vercel.sh
visudo --check --quiet

# Runtimes. `npm install --global` goes to /vercel, whose bin is first on PATH,
# so that it needs no sudo and survives the choice of another Node.
for n in /vercel/runtimes/node*; do
	ln -s ../lib/node_modules/npm/bin/npm-cli.js "$n/bin/npm"
	ln -s ../lib/node_modules/npm/bin/npx-cli.js "$n/bin/npx"
	chmod 0755 "$n/bin/node" "$n/lib/node_modules/npm/bin/npm-cli.js" "$n/lib/node_modules/npm/bin/npx-cli.js"
	printf 'prefix=/vercel\nupdate-notifier=false\nfund=false\naudit=false\n' >"$n/lib/node_modules/npm/npmrc"
done
mkdir -p /vercel/runtimes/python/bin
ln -s /usr/bin/python3 /vercel/runtimes/python/bin/python3
ln -s /usr/bin/python3 /vercel/runtimes/python/bin/python
ln -s /usr/bin/pip3 /vercel/runtimes/python/bin/pip3
ln -s /usr/bin/pip3 /vercel/runtimes/python/bin/pip
# pip installs as people expect of a container; /etc/pip.conf says the same for
# the day when an upgrade of Python brings this file back.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED

# Nothing of the host that built this, nothing that must be unique per machine.
: >/etc/machine-id
: >/etc/resolv.conf
chmod 0644 /etc/resolv.conf /etc/machine-id /etc/hosts /etc/hostname
rm -f /etc/apt/sources.list /etc/apt/apt.conf.d/99mmdebstrap /etc/dpkg/dpkg.cfg.d/99mmdebstrap
rm -f /etc/ssh/ssh_host_* /var/lib/dbus/machine-id /etc/.pwd.lock /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow-
rm -rf /var/cache/apt/* /var/cache/debconf/*-old /var/lib/apt/lists/* /var/log/* /var/tmp/* /root/.cache
