// Users and groups: all of it is commands and the image's own tools.
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { auth, check, checks, sdk, sh, user, version } from "./harness.mjs";

const sandbox = await sdk.Sandbox.create({ ...auth, timeout: 240_000 });
const out = async (who, ...args) => {
  const r = await who.runCommand(...args);
  assert.equal(r.exitCode, 0, await r.stderr());
  return (await r.stdout()).trimEnd();
};
const all = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
let alice, bob;

await check("createUser", async () => {
  alice = await sandbox.createUser("alice");
  bob = await sandbox.createUser("bob");
  assert.equal(alice.homeDir, "/home/alice");
  assert.equal(await out(alice, "id", ["-un"]), "alice");
  assert.equal(await out(alice, "pwd"), "/home/alice");
  assert.equal(await sh(sandbox, "stat -c '%U %G %a' /home/alice"), `alice ${user.name} 770`);
  await assert.rejects(sandbox.createUser("alice"), sdk.SandboxUserAlreadyExistsError);
  for (const bad of ["", "Alice", "1a", "a b", "a;b", "a".repeat(33)]) await assert.rejects(sandbox.createUser(bad), /Invalid username/);
});
await check("commands of a user: env, cwd, sudo, detached, timeout", async () => {
  assert.equal(await out(alice, { cmd: "sh", args: ["-c", "echo $A; pwd"], env: { A: "ä b'c" }, cwd: "/tmp" }), "ä b'c\n/tmp");
  assert.equal(await out(alice, { cmd: "id", args: ["-un"], sudo: true }), "root");
  const cmd = await alice.runCommand({ cmd: "sh", args: ["-c", "sleep 0.2; id -un"], detached: true });
  const ended = await cmd.wait();
  assert.equal(await ended.stdout(), "alice\n");
  assert.equal((await alice.runCommand("sleep", ["60"], { timeoutMs: 500 })).exitCode, 137);
  assert.equal((await alice.runCommand("sh", ["-c", "exit 9"])).exitCode, 9);
});
await check("files of a user", async () => {
  await alice.writeFiles([{ path: "deep/er/bin", content: all }, { path: "run.sh", content: "#!/bin/sh\nid -un\n", mode: 0o755 }]);
  assert.deepEqual(await alice.readFileToBuffer({ path: "deep/er/bin" }), all);
  assert.equal(await out(alice, "./run.sh"), "alice");
  assert.equal(await sh(sandbox, "stat -c '%U %G %a' /home/alice/deep /home/alice/deep/er; stat -c '%U %G' /home/alice/deep/er/bin"),
    `alice ${user.name} 770\nalice ${user.name} 770\nalice alice`);
  assert.equal(await alice.readFileToBuffer({ path: "none" }), null);
  await alice.mkDir("made");
  assert.equal(await sh(sandbox, "stat -c '%U %G %a' /home/alice/made"), `alice ${user.name} 770`);
  const dir = mkdtempSync(join(tmpdir(), "users-"));
  try {
    await alice.downloadFile({ path: "deep/er/bin" }, { path: "sub/bin", cwd: dir }, { mkdirRecursive: true });
    assert.deepEqual(readFileSync(join(dir, "sub/bin")), all);
  } finally {
    rmSync(dir, { recursive: true });
  }
});
await check("users are apart", async () => {
  await alice.runCommand("sh", ["-c", "umask 077; echo secret > private"]);
  assert.equal((await bob.runCommand("cat", ["/home/alice/private"])).exitCode, 1);
  assert.equal((await alice.readFileToBuffer({ path: "private" })).toString(), "secret\n");
  const long = await alice.runCommand({ cmd: "sleep", args: ["60"], detached: true });
  assert.notEqual((await bob.runCommand("pkill", ["-u", "alice", "sleep"])).exitCode, 0);
  await long.kill();
  assert.equal((await long.wait()).exitCode, 143);
});
await check("groups", async () => {
  const devs = await sandbox.createGroup("devs");
  assert.equal(devs.sharedDir, "/shared/devs");
  assert.equal(await sh(sandbox, "stat -c '%U %G %a' /shared/devs"), `${user.name} devs 2770`);
  assert.equal((await alice.runCommand("ls", ["/shared/devs"])).exitCode, 2);
  await sandbox.addUserToGroup("alice", "devs");
  await bob.addToGroup("devs");
  await alice.runCommand("sh", ["-c", "umask 002; echo from alice > /shared/devs/note"]);
  assert.equal(await out(bob, "cat", ["/shared/devs/note"]), "from alice");
  assert.equal(await sh(sandbox, "sudo stat -c '%U %G' /shared/devs/note"), "alice devs");
  await bob.removeFromGroup("devs");
  assert.notEqual((await bob.runCommand("cat", ["/shared/devs/note"])).exitCode, 0);
  await assert.rejects(sandbox.createGroup("devs"), /already exists/);
  await assert.rejects(sandbox.addUserToGroup("alice", "none"), /none/);
});
await check("asUser", async () => {
  const root = sandbox.asUser("root");
  assert.equal(root.homeDir, "/root");
  assert.equal(await out(root, "sh", ["-c", "id -un; pwd"]), "root\n/root");
  await root.writeFiles([{ path: "/root/f", content: "x" }]).then(
    () => assert.fail("the file API runs as the default user"),
    (err) => assert.equal(err.response?.status, 400, `${err}`));
  assert.equal(await out(sandbox.asUser("ubuntu"), { cmd: "id", args: ["-un"], cwd: "/" }), "ubuntu");
  const nobody = await sandbox.asUser("no_such_user").runCommand("id");
  assert.notEqual(nobody.exitCode, 0);
  assert.match(await nobody.stderr(), /no_such_user/);
});
await sandbox.delete();
console.log(`${version} users: ${checks()} checks`);
