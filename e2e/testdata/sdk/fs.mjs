// Every method of sandbox.fs, which are commands of the image's own tools.
import assert from "node:assert/strict";
import { auth, check, checks, sdk, user, version } from "./harness.mjs";

const sandbox = await sdk.Sandbox.create({ ...auth, timeout: 240_000 });
const { fs } = sandbox;
const all = Buffer.from(Array.from({ length: 256 }, (_, i) => i));

await check("readFile, writeFile, appendFile", async () => {
  await fs.writeFile("f", "ä");
  await fs.appendFile("f", Uint8Array.of(0xff, 0));
  await fs.appendFile("f", "z", "utf8");
  assert.deepEqual(await fs.readFile("f"), Buffer.from([0xc3, 0xa4, 0xff, 0, 0x7a]));
  await fs.appendFile("appended", "new");
  assert.equal(await fs.readFile("appended", "utf8"), "new");
  await fs.writeFile("bin", all);
  assert.deepEqual(await fs.readFile("bin"), all);
  assert.equal(await fs.readFile("bin", { encoding: "base64" }), all.toString("base64"));
  await assert.rejects(fs.readFile("none"), { code: "ENOENT" });
});
await check("mkdir, readdir", async () => {
  await fs.mkdir("d");
  await fs.mkdir("d/e/f", { recursive: true });
  await fs.mkdir("d/e/f", { recursive: true });
  await fs.writeFile("d/.hidden", "");
  await fs.writeFile("d/file with space", "");
  await fs.symlink("e", "d/link");
  assert.deepEqual((await fs.readdir("d")).sort(), ["e", "file with space", "link"]);
  const kinds = {};
  for (const entry of await fs.readdir("d", { withFileTypes: true })) {
    kinds[entry.name] = entry.isDirectory() ? "d" : entry.isSymbolicLink() ? "l" : entry.isFile() ? "f" : "?";
  }
  assert.deepEqual(kinds, { e: "d", link: "l", ".hidden": "f", "file with space": "f" });
  await assert.rejects(fs.readdir("none"), { code: "ENOENT" });
  await assert.rejects(fs.readdir("none", { withFileTypes: true }), { code: "ENOENT" });
});
await check("stat, lstat", async () => {
  const before = Date.now();
  await fs.writeFile("sized", Buffer.alloc(10_000));
  const stat = await fs.stat("sized");
  assert.equal(stat.size, 10_000);
  assert.ok(stat.isFile());
  assert.equal(stat.mode & 0o777, 0o644);
  assert.equal(stat.uid, user.uid);
  assert.equal(stat.nlink, 1);
  assert.ok(Math.abs(stat.mtimeMs - before) < 60_000, `mtime ${stat.mtimeMs}, now ${before}`);
  assert.ok((await fs.stat("d/link")).isDirectory());
  assert.ok((await fs.lstat("d/link")).isSymbolicLink());
  await assert.rejects(fs.stat("none"), { code: "ENOENT" });
  await assert.rejects(fs.lstat("none"), { code: "ENOENT" });
});
await check("access, exists", async () => {
  await fs.access("f");
  await assert.rejects(fs.access("none"), { code: "ENOENT" });
  assert.equal(await fs.exists("f"), true);
  assert.equal(await fs.exists("none"), false);
});
await check("rename, copyFile, unlink, rm, rmdir", async () => {
  await fs.copyFile("bin", "copy");
  await fs.rename("copy", "d/moved");
  assert.deepEqual(await fs.readFile("d/moved"), all);
  await fs.unlink("d/moved");
  await assert.rejects(fs.unlink("d/moved"), { code: "ENOENT" });
  await assert.rejects(fs.copyFile("none", "x"), { code: "ENOENT" });
  await assert.rejects(fs.rename("none", "x"), { code: "ENOENT" });
  await assert.rejects(fs.rmdir("d"), { code: "ENOTEMPTY" });
  await fs.rmdir("d/e/f");
  await assert.rejects(fs.rmdir("d/e/f"), { code: "ENOENT" });
  await fs.rm("d", { recursive: true });
  await assert.rejects(fs.rm("d"), { code: "ENOENT" });
  await fs.rm("d", { force: true });
});
await check("chmod, chown", async () => {
  await fs.chmod("f", 0o600);
  assert.equal((await fs.stat("f")).mode & 0o777, 0o600);
  await fs.chmod("f", "755");
  assert.equal((await fs.stat("f")).mode & 0o777, 0o755);
  await fs.chown("f", user.uid, user.uid);
  await assert.rejects(fs.chown("f", 0, 0), { code: "EACCES" });
  await assert.rejects(fs.chown("none", user.uid, user.uid), { code: "ENOENT" });
  await assert.rejects(fs.chmod("none", 0o600), { code: "ENOENT" });
});
await check("symlink, readlink, realpath", async () => {
  await fs.symlink("f", "to-f");
  await assert.rejects(fs.symlink("f", "to-f"), { code: "EEXIST" });
  assert.equal(await fs.readlink("to-f"), "f");
  assert.equal(await fs.realpath("to-f"), "/vercel/sandbox/f");
  await assert.rejects(fs.readlink("f"), { code: "EINVAL" });
  await assert.rejects(fs.realpath("none/at/all"), { code: "ENOENT" });
});
await check("truncate, mkdtemp", async () => {
  await fs.truncate("bin", 3);
  assert.deepEqual(await fs.readFile("bin"), all.subarray(0, 3));
  await fs.truncate("bin");
  assert.equal((await fs.stat("bin")).size, 0);
  const [a, b] = await Promise.all([fs.mkdtemp("/tmp/x-"), fs.mkdtemp("/tmp/x-")]);
  assert.match(a, /^\/tmp\/x-\w{6}$/);
  assert.notEqual(a, b);
  assert.ok((await fs.stat(a)).isDirectory());
});
await sandbox.stop();
console.log(`${version} fs: ${checks()} checks`);
