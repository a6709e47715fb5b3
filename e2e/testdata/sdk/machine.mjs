// What only a real machine can show, of SDK 2.x and 3.x.
import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { auth, check, checks, major, sdk, sh, status, user, version } from "./harness.mjs";

const { Sandbox } = sdk;
const sandbox = await Sandbox.create({ ...auth, name: "machine", timeout: 240_000, env: { BASEVAR: "b" } });
const sum = (b) => createHash("sha256").update(b).digest("hex");

await check("who, where, which", async () => {
  assert.equal(await sh(sandbox, "id -un; pwd; echo $HOME $LANG"), `${user.name}\n/vercel/sandbox\n${user.home} C.UTF-8`);
  assert.match(await sh(sandbox, "node -v"), /^v24\./);
  assert.match(await sh(sandbox, "python3 -V"), /^Python 3\./);
  assert.equal(await sh(sandbox, "sudo -n id -u; ls -d / >/dev/null && git --version | cut -d' ' -f1"), "0\ngit");
});
await check("sudo: HOME, SUDO_USER, the environment and PATH kept", async () => {
  const r = await sandbox.runCommand({
    cmd: "bash", args: ["-c", "echo $(id -un) $USER $HOME $SUDO_USER $BASEVAR $X $PATH"], env: { X: "own" }, sudo: true,
  });
  const path = await sh(sandbox, "echo $PATH");
  assert.equal(await r.stdout(), `root root /root ${user.name} b own ${path}\n`);
  assert.equal(await (await sandbox.runCommand({ cmd: "pwd", sudo: true })).stdout(), "/vercel/sandbox\n");
});
await check("signals", async () => {
  for (const [signal, code] of [["SIGINT", 130], ["SIGTERM", 143], ["SIGKILL", 137], ["SIGHUP", 129]]) {
    const cmd = await sandbox.runCommand({ cmd: "sleep", args: ["60"], detached: true });
    await cmd.kill(signal);
    assert.equal((await cmd.wait()).exitCode, code, signal);
  }
  const trap = await sandbox.runCommand({ cmd: "bash", args: ["-c", "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"], detached: true });
  for await (const line of trap.logs()) if (line.data.includes("ready")) await trap.kill();
  const ended = await trap.wait();
  assert.equal(ended.exitCode, 5);
  assert.equal(await ended.stdout(), "ready\ncaught\n");
});
await check("a timeout takes the whole command", async () => {
  const r = await sandbox.runCommand("bash", ["-c", "setsid sleep 77 & while :; do :; done"], { timeoutMs: 1000 });
  assert.equal(r.exitCode, 137);
  assert.equal((await sandbox.runCommand("pgrep", ["-f", "sleep 77"])).exitCode, 1);
  const detached = await sandbox.runCommand({ cmd: "sleep", args: ["60"], detached: true, timeoutMs: 300 });
  assert.equal((await detached.wait()).exitCode, 137);
});
await check("two readers of a log", async () => {
  const cmd = await sandbox.runCommand({ cmd: "bash", args: ["-c", "for i in $(seq 200); do echo line $i; done; sleep 0.3; echo err >&2; echo last"], detached: true });
  const read = async () => {
    const seen = { stdout: "", stderr: "" };
    for await (const line of cmd.logs()) seen[line.stream] += line.data;
    return seen;
  };
  const want = { stdout: Array.from({ length: 200 }, (_, i) => `line ${i + 1}\n`).join("") + "last\n", stderr: "err\n" };
  const [a, b] = await Promise.all([read(), read()]);
  assert.deepEqual(a, want);
  assert.deepEqual(b, want);
  assert.deepEqual(await read(), want);
});
await check("characters that arrive in pieces", async () => {
  await sandbox.writeFiles([{ path: "pieces.py", content: `
import os, time
for b in "ü€𝄞e\u0301漢".encode():
    os.write(1, bytes([b])); time.sleep(0.01)
` }]);
  assert.equal(await (await sandbox.runCommand("python3", ["pieces.py"])).stdout(), "ü€𝄞e\u0301漢");
  const text = "ä€𝄞漢\u2028\u0000\"\\".repeat(40_000);
  await sandbox.writeFiles([{ path: "text", content: text }]);
  assert.equal(await (await sandbox.runCommand("cat", ["text"])).stdout(), text);
});
await check("binary, by base64 and as a file", async () => {
  const data = randomBytes(1_000_003);
  await sandbox.writeFiles([{ path: "bin", content: data }]);
  assert.equal(Buffer.from(await sh(sandbox, "base64 bin"), "base64").compare(data), 0);
  assert.equal((await sandbox.readFileToBuffer({ path: "bin" })).compare(data), 0);
  await sh(sandbox, "base64 -d <<< " + data.subarray(0, 3000).toString("base64") + " > back");
  assert.equal((await sandbox.readFileToBuffer({ path: "back" })).compare(data.subarray(0, 3000)), 0);
});
await check("many files, and 16 MB", async () => {
  const big = randomBytes(16 << 20);
  const small = Array.from({ length: 300 }, (_, i) => ({ path: `many/${i % 7}/${i}`, content: `file ${i}` }));
  await sandbox.writeFiles([{ path: "big", content: big }, ...small]);
  assert.equal((await sh(sandbox, "sha256sum big")).split(" ")[0], sum(big));
  assert.equal(sum(await sandbox.readFileToBuffer({ path: "big" })), sum(big));
  assert.equal(await sh(sandbox, "find many -type f | wc -l; cat many/3/220; stat -c %U many many/3 many/3/220 | sort -u"), `300\nfile 220${user.name}`);
});
await check("extendTimeout is exact", async () => {
  const { timeout } = sandbox.currentSession();
  await sandbox.extendTimeout(61_234);
  await sandbox.extendTimeout(1);
  assert.equal(sandbox.currentSession().timeout, timeout + 61_235);
  if (major >= 3) assert.ok(sandbox.expiresAt.getTime() > Date.now() + timeout);
});
for (const [runtime, line, want] of [
  ["node22", "node -v", /^v22\./], ["node24", "node -v", /^v24\./], ["python3.13", "python3 -V", /^Python 3\.13/],
]) {
  await check(`runtime ${runtime}`, async () => {
    let box;
    try {
      box = await Sandbox.create({ ...auth, runtime, timeout: 60_000 });
    } catch (err) {
      // An image that has another Python says which runtimes there are.
      if (runtime !== "python3.13") throw err;
      return status(400, /node22.*node24/)(err);
    }
    assert.match(await sh(box, line), want);
    assert.equal(await sh(box, "id -un; pwd; sudo -n id -un"), "vercel-sandbox\n/vercel/sandbox\nroot");
    assert.match(await sh(box, `sudo -n ${line}`), want);
    assert.equal(await sh(box, "X=mine sudo -n sh -c 'echo $HOME $USER $SUDO_USER $X $PATH'"), `/root root vercel-sandbox mine ${await sh(box, "echo $PATH")}`);
    if (runtime.startsWith("node")) assert.equal(await sh(box, "which node; sudo -n which node"), `/vercel/runtimes/${runtime}/bin/node\n`.repeat(2).trim());
    await box.delete();
  });
}
await check("an unknown runtime names those that exist", () =>
  assert.rejects(Sandbox.create({ ...auth, runtime: "cobol85" }), status(400, /cobol85.*node22.*node24/)));
await check("an unknown image says so", () =>
  assert.rejects(Sandbox.create({ ...auth, image: "example.com/none:1" }), status(404, /example\.com\/none/)));
await check("await using stops", async () => {
  const box = await Sandbox.create({ ...auth, timeout: 60_000 });
  assert.equal(await sh(box, "echo in"), "in");
  await box[Symbol.asyncDispose](); // what the statement calls; Node has it from 24 on
  assert.equal((await Sandbox.get({ ...auth, name: box.name, resume: false })).status, "stopped");
});
await check("resumed by a command, with fresh files and the environment", async () => {
  await sh(sandbox, "echo old > kept; sudo touch /etc/marked");
  const before = sandbox.currentSession().sessionId;
  await sandbox.stop();
  assert.equal(await sh(sandbox, "echo $BASEVAR; ls kept /etc/marked 2>/dev/null | wc -l; pwd"), "b\n0\n/vercel/sandbox");
  assert.notEqual(sandbox.currentSession().sessionId, before);
  await sandbox.stop();
  // Many at once start one session.
  const outs = await Promise.all(Array.from({ length: 5 }, (_, i) => sh(sandbox, `echo ${i}`)));
  assert.deepEqual(outs, ["0", "1", "2", "3", "4"]);
  const sessions = [];
  for await (const s of await sandbox.listSessions()) sessions.push(s.id);
  assert.equal(sessions.length, 3);
});
await check("getOrCreate at the same time", async () => {
  const boxes = await Promise.allSettled(Array.from({ length: 3 }, () => Sandbox.getOrCreate({ ...auth, name: "shared" })));
  const made = boxes.filter((b) => b.status === "fulfilled").map((b) => b.value);
  for (const b of boxes) if (b.status === "rejected") status(409)(b.reason); // the SDK has no word for a lost race
  assert.ok(made.length >= 1);
  assert.equal(new Set(made.map((b) => b.currentSession().sessionId)).size, 1);
  assert.equal(await sh(made[0], "echo here"), "here");
});
await check("a session that times out", async () => {
  const box = await Sandbox.create({ ...auth, timeout: 1500 });
  const cmd = await box.runCommand({ cmd: "sleep", args: ["60"], detached: true });
  // Its commands get SIGTERM first, and how they ended is known.
  assert.equal((await cmd.wait()).exitCode, 143);
  const session = async () => (await Sandbox.get({ ...auth, name: box.name, resume: false })).status;
  for (const end = Date.now() + 20_000; await session() === "stopping";) assert.ok(Date.now() < end, "it does not end");
  assert.equal(await session(), "stopped");
});
console.log(`${version} machine: ${checks()} checks`);
