// Drives a server through the official SDK 2.x or 3.x, unmodified. Usage:
// SDK_DIR=… BASE=http://… [TOKEN=… TEAM=… PROJECT=… OTHER_TOKEN=… …] node v3.mjs
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { PassThrough } from "node:stream";

const root = join(process.env.SDK_DIR, "node_modules/@vercel/sandbox");
const version = JSON.parse(readFileSync(join(root, "package.json"))).version;
const major = Number(version.split(".")[0]);
const { Sandbox, APIError } = await import(pathToFileURL(join(root, "dist/index.js")));

const base = process.env.BASE;
const calls = [];
const fetch = (url, init) => {
  calls.push(`${init.method} ${new URL(url).pathname}`);
  return globalThis.fetch(url.replace("https://vercel.com/api/", `${base}/api/`), init);
};
const { TOKEN = "secret-token", TEAM = "team_self", PROJECT = "prj_self" } = process.env;
const { OTHER_TOKEN = "other-token", OTHER_TEAM = "team_other", OTHER_PROJECT = "prj_other" } = process.env;
const auth = { token: TOKEN, teamId: TEAM, projectId: PROJECT, fetch };
const other = { token: OTHER_TOKEN, teamId: OTHER_TEAM, projectId: OTHER_PROJECT, fetch };
const status = (code, match) => (err) => {
  assert.ok(err instanceof APIError, `${err?.stack}`);
  assert.equal(err.response.status, code);
  if (match) assert.match(major >= 3 ? err.message : err.text, match); // 2.x shows the status alone
  return true;
};
let done = 0;
const check = async (name, fn) => {
  try {
    await fn();
    done++;
  } catch (err) {
    console.error(`FAIL ${name}: ${err?.stack ?? err}`);
    console.error(calls.slice(-6).join("\n"));
    process.exit(1);
  }
};

const tag = `t${process.pid}`;
let sandbox;
await check("create", async () => {
  sandbox = await Sandbox.create({
    ...auth, name: `${tag}-main`, timeout: 120_000, resources: { vcpus: 2 },
    env: { BASEVAR: "b" }, tags: { run: tag },
  });
  assert.equal(sandbox.name, `${tag}-main`);
  assert.equal(sandbox.status, "running");
  assert.equal(sandbox.persistent, false);
  assert.equal(sandbox.memory, 4096);
  assert.equal(sandbox.timeout, 120_000);
  assert.deepEqual(sandbox.tags, { run: tag });
  assert.deepEqual(sandbox.routes, []);
  assert.equal(sandbox.networkPolicy, "deny-all");
});
await check("create refuses a taken name", () =>
  assert.rejects(Sandbox.create({ ...auth, name: `${tag}-main` }), status(409, /taken|already/)));
await check("create with a runtime", async () => {
  const box = await Sandbox.create({ ...auth, name: `${tag}-runtime`, runtime: "node22" });
  assert.equal(box.runtime, "node22");
  await box.delete();
});
for (const [name, extra] of Object.entries({
  persistent: { persistent: true },
  policy: { networkPolicy: "allow-all" },
  policyObject: { networkPolicy: { allow: ["example.com"] } },
  ports: { ports: [3000] },
  git: { source: { type: "git", url: "https://example.com/a.git" } },
  snapshot: { source: { type: "snapshot", snapshotId: "snap_x" } },
  keep: { keepLastSnapshots: { count: 1 } },
})) {
  await check(`create does not pretend: ${name}`, () =>
    assert.rejects(Sandbox.create({ ...auth, ...extra }), (err) => {
      assert.equal(err.json?.error?.code, "not_implemented");
      return status(400, /does not have/)(err);
    }));
}
await check("create accepts deny-all and persistent: false", async () => {
  const box = await Sandbox.create({ ...auth, name: `${tag}-b`, networkPolicy: "deny-all", persistent: false, tags: { run: tag } });
  assert.equal(box.networkPolicy, "deny-all");
});
await check("get, and 404", async () => {
  const again = await Sandbox.get({ ...auth, name: `${tag}-main` });
  assert.equal(again.currentSession().sessionId, sandbox.currentSession().sessionId);
  await assert.rejects(Sandbox.get({ ...auth, name: `${tag}-none` }), status(404));
  await assert.rejects(Sandbox.get({ ...auth, name: "näme /../x" }), status(404));
});
await check("getOrCreate", async () => {
  let made = 0;
  const params = { ...auth, name: `${tag}-goc`, onCreate: () => { made++; } };
  await Sandbox.getOrCreate(params);
  const box = await Sandbox.getOrCreate(params);
  assert.equal(made, 1);
  await box.delete();
});
await check("wrong token, team, project", async () => {
  await assert.rejects(Sandbox.get({ ...auth, token: "nope", name: "x" }), status(401));
  await assert.rejects(Sandbox.get({ ...auth, teamId: OTHER_TEAM, name: "x" }), status(403));
  await assert.rejects(Sandbox.get({ ...auth, projectId: OTHER_PROJECT, name: "x" }), status(403));
  await assert.rejects(Sandbox.create({ ...auth, projectId: OTHER_PROJECT }), status(403));
  await assert.rejects(Sandbox.get({ ...other, name: `${tag}-main` }), status(404));
});
await check("list, pages, filters", async () => {
  const names = [];
  for await (const box of await Sandbox.list({ ...auth, limit: 1, sortBy: "name", sortOrder: "asc", namePrefix: `${tag}-` })) names.push(box.name);
  assert.deepEqual(names, [`${tag}-b`, `${tag}-main`]);
  const tagged = await (await Sandbox.list({ ...auth, tags: { run: tag } })).toArray();
  assert.equal(tagged.length, 2);
  assert.deepEqual(await (await Sandbox.list({ ...auth, namePrefix: "no-such" })).toArray(), []);
  await assert.rejects(Sandbox.list({ ...auth, sortBy: "nonsense" }), status(400, /sortBy/));
});

await check("run", async () => {
  const r = await sandbox.runCommand("sh", ["-c", "echo $BASEVAR; echo err >&2; exit 3"]);
  assert.equal(r.exitCode, 3);
  assert.equal(await r.stdout(), "b\n");
  assert.equal(await r.stderr(), "err\n");
  if (major >= 3) assert.equal(typeof r.durationMs, "number");
});
await check("run with cwd, env, streams", async () => {
  await sandbox.mkDir("sub");
  const out = new PassThrough(), chunks = [];
  out.on("data", (c) => chunks.push(c));
  const r = await sandbox.runCommand({ cmd: "sh", args: ["-c", "basename $PWD; echo $X"], cwd: "sub", env: { X: "ü𝄞" }, stdout: out });
  assert.equal(r.exitCode, 0);
  assert.equal(Buffer.concat(chunks).toString(), "sub\nü𝄞\n");
});
await check("output of any bytes", async () => {
  const text = "päöü€𝄞\u2028\"\\\t".repeat(5000);
  await sandbox.writeFiles([{ path: "text", content: text }]);
  const r = await sandbox.runCommand("cat", ["text"]);
  assert.equal(await r.stdout(), text);
  const bin = await sandbox.runCommand("printf", ["a\\377b\\303"]);
  assert.equal(await bin.stdout(), "a\ufffdb\ufffd");
});
await check("no output, missing executable, signal", async () => {
  const r = await sandbox.runCommand("true");
  assert.equal(r.exitCode, 0);
  assert.equal(await r.output("both"), "");
  const missing = await sandbox.runCommand("no-such-program");
  assert.equal(missing.exitCode, 127);
  assert.match(await missing.stderr(), /not found/);
  assert.equal((await sandbox.runCommand("sh", ["-c", "kill -9 $$"])).exitCode, 137);
});
await check("a big argument", async () => {
  const big = "x".repeat(100_000);
  const r = await sandbox.runCommand("printf", ["%s", big]);
  assert.equal(await r.stdout(), big);
});
await check("a silent command survives", async () => {
  const r = await sandbox.runCommand("sh", ["-c", "sleep 1; echo late"]);
  assert.equal(await r.stdout(), "late\n");
});
await check("a wait for longer than headers may take", async () => {
  const cmd = await sandbox.runCommand({ cmd: "sleep", args: ["1.5"], detached: true });
  assert.equal((await cmd.wait()).exitCode, 0);
});
await check("command timeout", async () => {
  const r = await sandbox.runCommand({ cmd: "sleep", args: ["30"], timeoutMs: 200 });
  assert.equal(r.exitCode, 137);
});
await check("detached, logs twice, wait, kill", async () => {
  const cmd = await sandbox.runCommand({ cmd: "sh", args: ["-c", "echo one; sleep 0.3; echo two"], detached: true });
  assert.equal(cmd.exitCode, null);
  const read = async () => {
    let all = "";
    for await (const line of cmd.logs()) all += `${line.stream}:${line.data}`;
    return all.replaceAll("\nstdout:", "\n");
  };
  assert.deepEqual(await Promise.all([read(), read()]), ["stdout:one\ntwo\n", "stdout:one\ntwo\n"]);
  assert.equal((await cmd.wait()).exitCode, 0);
  assert.equal(await read(), "stdout:one\ntwo\n");
  const again = await sandbox.getCommand(cmd.cmdId);
  assert.equal(again.exitCode, 0);

  const sleeper = await sandbox.runCommand({ cmd: "sleep", args: ["30"], detached: true });
  await sleeper.kill("SIGTERM");
  assert.equal((await sleeper.wait()).exitCode, 143);
  await sleeper.kill();
  await assert.rejects(sandbox.getCommand("cmd_none"), status(404));
});
await check("an abort kills the command", async () => {
  const abort = new AbortController();
  const run = sandbox.runCommand({ cmd: "sh", args: ["-c", "echo $$ > pid; exec sleep 30"], signal: abort.signal });
  for (;;) {
    const pid = (await sandbox.readFileToBuffer({ path: "pid" }))?.toString().trim();
    if (!pid) continue;
    abort.abort();
    await assert.rejects(run);
    for (;;) {
      if ((await sandbox.runCommand("sh", ["-c", `kill -0 ${pid}`])).exitCode !== 0) return;
      await new Promise((r) => setTimeout(r, 10));
    }
  }
});
await check("files", async () => {
  const all = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
  const big = Buffer.alloc(3_000_000, all);
  await sandbox.writeFiles([
    { path: "a/b/all.bin", content: all }, { path: "empty", content: Buffer.alloc(0) },
    { path: "/tmp/big", content: big }, { path: "ünï.txt", content: "x" },
    { path: "run.sh", content: "#!/bin/sh\necho ran\n", mode: 0o755 },
  ]);
  assert.deepEqual(await sandbox.readFileToBuffer({ path: "a/b/all.bin" }), all);
  assert.equal((await sandbox.readFileToBuffer({ path: "empty" })).length, 0);
  assert.ok((await sandbox.readFileToBuffer({ path: "/tmp/big" })).equals(big));
  assert.equal((await sandbox.readFileToBuffer({ path: "ünï.txt" })).toString(), "x");
  assert.equal(await (await sandbox.runCommand("./run.sh")).stdout(), "ran\n");
  assert.equal(await sandbox.readFile({ path: "nope" }), null);
  await assert.rejects(sandbox.readFileToBuffer({ path: "a" }), status(400));
  await sandbox.mkDir("newdir");
  await assert.rejects(sandbox.mkDir("newdir"), status(400));
});
await check("fs module", async () => {
  await sandbox.fs.mkdir("deep/er", { recursive: true });
  await sandbox.fs.writeFile("deep/er/f", "1");
  await sandbox.fs.appendFile("deep/er/f", "2");
  assert.equal(await sandbox.fs.readFile("deep/er/f", "utf8"), "12");
  assert.deepEqual(await sandbox.fs.readdir("deep"), ["er"]);
  assert.equal((await sandbox.fs.stat("deep/er/f")).size, 2);
  await sandbox.fs.rm("deep", { recursive: true });
  await assert.rejects(sandbox.fs.readFile("deep/er/f"), { code: "ENOENT" });
});
await check("extend timeout", async () => {
  const before = sandbox.currentSession().timeout;
  await sandbox.extendTimeout(60_000);
  assert.equal(sandbox.currentSession().timeout, before + 60_000);
  await assert.rejects(sandbox.extendTimeout(432_000_000), (err) => {
    assert.equal(err.json.error.code, "sandbox_timeout_invalid");
    return status(400)(err);
  });
});
await check("update", async () => {
  await sandbox.update({ tags: { a: "b" }, resources: { vcpus: 1 }, networkPolicy: "deny-all" });
  assert.deepEqual(sandbox.tags, { a: "b" });
  await assert.rejects(sandbox.update({ persistent: true }), status(400, /persistent/));
  await assert.rejects(sandbox.update({ networkPolicy: "allow-all" }), status(400, /deny-all/));
});
await check("what comes later", async () => {
  await assert.rejects(sandbox.snapshot(), status(400, /snapshots/));
  const snapshots = sandbox.listSnapshots?.();
  if (snapshots) await assert.rejects((async () => { for await (const s of await snapshots) void s; })(), status(400));
  if (Sandbox.fork) await assert.rejects(Sandbox.fork({ ...auth, sourceSandbox: sandbox.name, persistent: false, ports: [1234] }), status(400));
});
await check("stop, then resume by itself", async () => {
  const first = sandbox.currentSession().sessionId;
  const old = await sandbox.runCommand({ cmd: "echo", args: ["kept"], detached: true });
  await old.wait();
  await sandbox.stop();
  assert.equal(sandbox.status, "stopped");
  let log = "";
  for await (const line of old.logs()) log += line.data;
  assert.equal(log, "kept\n");
  const stopped = await Sandbox.get({ ...auth, name: sandbox.name, resume: false });
  assert.equal(stopped.status, "stopped");
  let resumed = 0;
  const box = await Sandbox.get({ ...auth, name: sandbox.name, resume: false, onResume: () => { resumed++; } });
  assert.equal(await (await box.runCommand("echo", ["again"])).stdout(), "again\n");
  assert.equal(resumed, 1);
  assert.notEqual(box.currentSession().sessionId, first);
  // An upload that is refused midway is heard, and sent once more.
  await box.stop();
  const big = randomBytes(20_000_000);
  await box.writeFiles([{ path: "big", content: big }]);
  assert.equal(resumed, 2);
  assert.ok((await box.readFileToBuffer({ path: "big" })).equals(big));
  const sessions = [];
  for await (const s of await box.listSessions({ limit: 1 })) sessions.push(s.id);
  assert.equal(sessions.length, 3);
  assert.ok(sessions.includes(first));
  await box.delete();
  await assert.rejects(Sandbox.get({ ...auth, name: box.name }), status(404));
  await assert.rejects(box.runCommand("true"), status(404));
});
console.log(`${version}: ${done} checks`);
