// What the programs of this directory share. They drive a server through an
// official SDK, unmodified, as their environment says:
// SDK_DIR=… BASE=http://… TOKEN=… TEAM=… PROJECT=… node NAME.mjs
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const { SDK_DIR, BASE, TOKEN, TEAM, PROJECT } = process.env;
const root = join(SDK_DIR, "node_modules/@vercel/sandbox");
export const version = JSON.parse(readFileSync(join(root, "package.json"))).version;
export const major = Number(version.split(".")[0]);
/** The default user: /v3 has another one than /v2 and /v1. */
export const user = major >= 3
  ? { name: "ubuntu", uid: 1000, home: "/vercel" }
  : { name: "vercel-sandbox", uid: 1001, home: "/home/vercel-sandbox" };
export const sdk = await import(pathToFileURL(join(root, "dist/index.js")));
export const auth = {
  token: TOKEN, teamId: TEAM, projectId: PROJECT,
  fetch: (url, init) => globalThis.fetch(url.replace("https://vercel.com/api/", `${BASE}/api/`), init),
};

let done = 0;
/** Runs one check; the first that fails ends the program. */
export async function check(name, fn) {
  try {
    await fn();
    done++;
  } catch (err) {
    console.error(`FAIL ${name}: ${err?.stack ?? err}\n${err?.text ?? ""}`);
    process.exit(1);
  }
}
export const checks = () => done;

/** Matches an APIError of that status whose body matches. */
export const status = (code, match = /./) => (err) => {
  assert.ok(err instanceof sdk.APIError, `${err?.stack}`);
  assert.equal(err.response.status, code, err.text);
  assert.match(err.text, match);
  return true;
};

/** What a shell line prints; it must succeed. */
export async function sh(sandbox, line) {
  const r = await sandbox.runCommand("bash", ["-c", line]);
  assert.equal(r.exitCode, 0, `${line}: ${await r.stderr()}`);
  return (await r.stdout()).trimEnd();
}
