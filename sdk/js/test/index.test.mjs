import assert from "node:assert/strict";
import { test } from "node:test";
import { createFetch, fetch, patchDomain } from "../index.js";

const seen = [];
const record = async (input, init) => { seen.push({ input, init }); return new Response("{}"); };
const last = () => seen.at(-1);

test("only Vercel's API is rewritten", async () => {
  const f = createFetch({ url: "http://host:7070/", fetch: record });
  for (const [from, to] of [
    ["https://vercel.com/api/v3/sandboxes?teamId=a%20b", "http://host:7070/api/v3/sandboxes?teamId=a%20b"],
    ["https://vercel.com/api-other", "https://vercel.com/api-other"],
    ["https://vercel.com.evil.test/api/x", "https://vercel.com.evil.test/api/x"],
    ["https://example.com/?u=https://vercel.com/api/", "https://example.com/?u=https://vercel.com/api/"],
  ]) {
    await f(from);
    assert.equal(last().input, to);
    await f(new URL(from));
    assert.equal(String(last().input), to);
    await f(new Request(from, { method: "POST", body: "b", headers: { x: "y" } }));
    assert.equal(last().input.url, to);
    assert.equal(last().input.method, "POST");
    assert.equal(last().input.headers.get("x"), "y");
    assert.equal(await last().input.text(), "b");
  }
});

test("a path of the server stays", async () => {
  await createFetch({ url: "https://host/under/", fetch: record })("https://vercel.com/api/v2/user");
  assert.equal(last().input, "https://host/under/api/v2/user");
});

test("init is passed on, dispatcher included", async () => {
  const init = { method: "POST", dispatcher: {}, headers: { authorization: "Bearer a" }, body: "x" };
  await createFetch({ url: "http://host", fetch: record })("https://vercel.com/api/x", init);
  assert.equal(last().init, init);
});

test("token replaces the SDK's, and goes nowhere else", async () => {
  const f = createFetch({ url: "http://host", token: "clo_x", fetch: record });
  const init = { dispatcher: {}, headers: { Authorization: "Bearer a", "x-cwd": "/" } };
  await f("https://vercel.com/api/x", init);
  assert.equal(last().init.headers.get("authorization"), "Bearer clo_x");
  assert.equal(last().init.headers.get("x-cwd"), "/");
  assert.equal(last().init.dispatcher, init.dispatcher);
  await f("https://example.com/", init);
  assert.equal(last().init, init);
});

test("an address is needed", () => {
  delete process.env.CLOCHE_URL;
  assert.throws(() => createFetch(), /CLOCHE_URL is not set/);
  assert.throws(() => createFetch({ url: "host:7070" }), /not an http/);
  assert.throws(() => createFetch({ url: "nonsense" }), /not an http/);
  assert.throws(() => fetch("https://vercel.com/api/x"), /CLOCHE_URL is not set/);
});

test("fetch reads CLOCHE_URL and globalThis.fetch at each call", async () => {
  const original = globalThis.fetch;
  globalThis.fetch = record;
  process.env.CLOCHE_URL = "http://other:1";
  try {
    await fetch("https://vercel.com/api/x");
    assert.equal(last().input, "http://other:1/api/x");
  } finally {
    globalThis.fetch = original;
    delete process.env.CLOCHE_URL;
  }
});

test("patchDomain", () => {
  class Session {
    routes = [{ url: "http://a.test:8080/", subdomain: "a", port: 80 }];
    domain(port) { throw new Error(`No route for port ${port}`); }
  }
  patchDomain(Session, Session);
  patchDomain(Session);
  assert.equal(new Session().domain(80), "http://a.test:8080");
  assert.throws(() => new Session().domain(81), /No route for port 81/);
  assert.throws(() => patchDomain(class {}), TypeError);
});
