// Drives a server through the official SDK 1.x, unmodified. Usage:
// SDK_DIR=… BASE=http://… [TOKEN=… TEAM=… PROJECT=…] node v1.mjs
import assert from "node:assert/strict";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const root = join(process.env.SDK_DIR, "node_modules/@vercel/sandbox");
const { Sandbox, APIError } = await import(pathToFileURL(join(root, "dist/index.js")));
const base = process.env.BASE;
const fetch = (url, init) => globalThis.fetch(url.replace("https://vercel.com/api/", `${base}/api/`), init);
const { TOKEN = "secret-token", TEAM = "team_self", PROJECT = "prj_self" } = process.env;
const auth = { token: TOKEN, teamId: TEAM, projectId: PROJECT, fetch };
const status = (code) => (err) => {
  assert.ok(err instanceof APIError, `${err?.stack}`);
  assert.equal(err.response.status, code, err.message);
  return true;
};
let done = 0;
const check = async (name, fn) => {
  try {
    await fn();
    done++;
  } catch (err) {
    console.error(`FAIL ${name}: ${err?.stack ?? err}`);
    process.exit(1);
  }
};

let sandbox;
await check("create, get", async () => {
  sandbox = await Sandbox.create({ ...auth, timeout: 120_000, env: { BASEVAR: "b" } });
  assert.equal(sandbox.status, "running");
  assert.deepEqual(sandbox.routes, []);
  const again = await Sandbox.get({ ...auth, sandboxId: sandbox.sandboxId });
  assert.equal(again.sandboxId, sandbox.sandboxId);
  await assert.rejects(Sandbox.get({ ...auth, sandboxId: "sbx_none" }), status(404));
  await assert.rejects(Sandbox.create({ ...auth, ports: [3000] }), status(400));
  await assert.rejects(Sandbox.create({ ...auth, networkPolicy: "allow-all" }), status(400));
});
await check("list by windows of time", async () => {
  const second = await Sandbox.create({ ...auth });
  const seen = [];
  for (let until; ;) {
    const { json } = await Sandbox.list({ ...auth, limit: 1, until });
    seen.push(...json.sandboxes.map((s) => s.id));
    if (json.pagination.next === null) break;
    until = json.pagination.next;
  }
  assert.deepEqual(new Set(seen), new Set([sandbox.sandboxId, second.sandboxId]));
  assert.equal(seen.length, 2);
  await second.stop();
});
await check("run", async () => {
  const r = await sandbox.runCommand("sh", ["-c", "echo $BASEVAR ü; echo err >&2; exit 3"]);
  assert.equal(r.exitCode, 3);
  assert.equal(await r.stdout(), "b ü\n");
  assert.equal(await r.stderr(), "err\n");
});
await check("detached, wait, kill", async () => {
  const cmd = await sandbox.runCommand({ cmd: "sleep", args: ["30"], detached: true });
  assert.equal(cmd.exitCode, null);
  await cmd.kill("SIGINT");
  assert.equal((await cmd.wait()).exitCode, 130);
  assert.equal((await sandbox.getCommand(cmd.cmdId)).exitCode, 130);
});
await check("files", async () => {
  const all = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
  await sandbox.mkDir("d");
  await assert.rejects(sandbox.mkDir("d"), status(400));
  await sandbox.writeFiles([{ path: "d/all", content: all }]);
  assert.deepEqual(await sandbox.readFileToBuffer({ path: "d/all" }), all);
  assert.equal(await sandbox.readFile({ path: "nope" }), null);
});
await check("extend, policy, snapshot", async () => {
  const before = sandbox.timeout;
  await sandbox.extendTimeout(1000);
  assert.equal(sandbox.timeout, before + 1000);
  await sandbox.updateNetworkPolicy("deny-all");
  await assert.rejects(sandbox.updateNetworkPolicy("allow-all"), status(400));
  await assert.rejects(sandbox.snapshot(), status(400));
});
await check("stop", async () => {
  await sandbox.stop({ blocking: true });
  assert.equal(sandbox.status, "stopped");
  await assert.rejects(sandbox.runCommand("true"), status(410));
});
console.log(`1.x: ${done} checks`);
