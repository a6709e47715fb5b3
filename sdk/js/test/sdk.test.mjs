// With the official SDKs, unmodified. SDK_DIRS is a list of directories whose
// node_modules has one; "go test ./e2e/sdk" installs them and sets it.
import assert from "node:assert/strict";
import { spawnSync, spawn } from "node:child_process";
import { mkdtempSync, rmSync, symlinkSync, mkdirSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { jwt, mock } from "./mock.mjs";

const dirs = (process.env.SDK_DIRS ?? "").split(delimiter).filter(Boolean);
const here = fileURLToPath(new URL("..", import.meta.url));

const esm = `
  const { Sandbox } = await import("@vercel/sandbox");
  const sandbox = await Sandbox.create(OPTIONS);
  console.log(sandbox.domain(3000));
  try { sandbox.domain(1); } catch (err) { console.log(err.message); }
`;
const cjs = `(async () => {
  const { Sandbox } = require("@vercel/sandbox");
  const sandbox = await Sandbox.create(OPTIONS);
  console.log(sandbox.domain(3000));
  try { sandbox.domain(1); } catch (err) { console.log(err.message); }
})();`;
const domains = "http://port-3000.example.test:8080\nNo route for port 1\n";

/** Runs a program in a directory that has both the SDK and this package. */
async function run(dir, type, program, env, flags = []) {
  const work = mkdtempSync(join(tmpdir(), "cloche-sandbox-"));
  try {
    mkdirSync(join(work, "node_modules/@vercel"), { recursive: true });
    symlinkSync(join(dir, "node_modules/@vercel/sandbox"), join(work, "node_modules/@vercel/sandbox"));
    symlinkSync(here, join(work, "node_modules/cloche-sandbox"));
    const child = spawn(process.execPath, [...flags, `--input-type=${type}`, "-e", program], {
      cwd: work,
      env: { PATH: process.env.PATH, HOME: work, ...env },
      stdio: ["ignore", "pipe", "pipe"],
    });
    const text = async (stream) => { let all = ""; for await (const chunk of stream) all += chunk; return all; };
    const [out, err, code] = await Promise.all([text(child.stdout), text(child.stderr), new Promise((r) => child.on("close", r))]);
    return { out, err, code };
  } finally {
    rmSync(work, { recursive: true });
  }
}

test("some SDK is here", { skip: dirs.length === 0 && "SKIPPED: SDK_DIRS is not set, so no SDK was tested" }, () => {});

for (const dir of dirs) {
  const name = dir.split(/[\\/]/).at(-1);
  for (const [type, program] of [["module", esm], ["commonjs", cjs]]) {
    for (const flags of [[], ["--enable-source-maps", "--stack-trace-limit=0"]]) {
      test(`${name}: register, ${type} ${flags}`, async () => {
        const server = await mock();
        try {
          const token = jwt();
          const r = await run(dir, type, program.replace("OPTIONS", "{}"), { CLOCHE_URL: server.url, CLOCHE_TOKEN: token }, [...flags, "--import", "cloche-sandbox/register"]);
          assert.equal(r.out, domains, r.err);
          assert.equal(r.code, 0);
          assert.match(server.requests[0].url, /^\/api\/v\d\/sandboxes\?teamId=team_jwt$/);
          assert.equal(server.requests[0].authorization, `Bearer ${token}`);
          assert.equal(JSON.parse(server.requests[0].body).projectId, "prj_jwt");
        } finally {
          await server.close();
        }
      });
    }
  }

  test(`${name}: the fetch option`, async () => {
    const server = await mock();
    try {
      const options = `{ token: "clo_a", teamId: "t", projectId: "p", fetch: (await import("cloche-sandbox")).createFetch({ url: ${JSON.stringify(server.url)} }) }`;
      const r = await run(dir, "module", esm.replace("OPTIONS", options), {});
      assert.equal(r.out, domains, r.err);
      assert.equal(server.requests[0].authorization, "Bearer clo_a");
    } finally {
      await server.close();
    }
  });
}

test("register without an address stops the process", () => {
  const r = spawnSync(process.execPath, ["--import", join(here, "register.js"), "-e", "console.log('ran')"], { env: { PATH: process.env.PATH }, encoding: "utf8" });
  assert.notEqual(r.status, 0);
  assert.equal(r.stdout, "");
  assert.match(r.stderr, /CLOCHE_URL is not set/);
});

test("register leaves an opaque token and a given one alone", () => {
  const program = "console.log(process.env.VERCEL_OIDC_TOKEN)";
  for (const [env, want] of [
    [{ CLOCHE_TOKEN: "clo_opaque" }, "undefined\n"],
    [{ CLOCHE_TOKEN: "a.b.c", VERCEL_OIDC_TOKEN: "mine" }, "mine\n"],
    [{ CLOCHE_TOKEN: "a.b.c" }, "a.b.c\n"],
  ]) {
    const r = spawnSync(process.execPath, ["--import", join(here, "register.js"), "-e", program], { env: { PATH: process.env.PATH, CLOCHE_URL: "http://x", ...env }, encoding: "utf8" });
    assert.equal(r.stdout, want, r.stderr);
  }
});

test("an opaque token where the SDK needs the other form stops the process", () => {
  const r = spawnSync(process.execPath, ["--import", join(here, "register.js"), "-e", "console.log('ran')"],
    { env: { PATH: process.env.PATH, CLOCHE_URL: "http://x", VERCEL_OIDC_TOKEN: "clo_x" }, encoding: "utf8" });
  assert.notEqual(r.status, 0);
  assert.equal(r.stdout, "");
  assert.match(r.stderr, /cloche token create --jwt/);
});
