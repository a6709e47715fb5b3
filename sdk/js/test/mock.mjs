// A tiny server that answers what the SDK needs to make a sandbox with a route.
import { createServer } from "node:http";

export async function mock() {
  const requests = [];
  const server = createServer(async (req, res) => {
    let body = "";
    for await (const chunk of req) body += chunk;
    requests.push({ method: req.method, url: req.url, authorization: req.headers.authorization, body });
    const session = {
      id: "sbx_1", memory: 2048, vcpus: 1, region: "local", runtime: "node24", timeout: 300000, status: "running",
      requestedAt: 1, createdAt: 1, startedAt: 1, updatedAt: 1, cwd: "/vercel/sandbox",
    };
    const routes = [{ url: "http://port-3000.example.test:8080/", subdomain: "port-3000", port: 3000 }];
    const sandbox = req.url.includes("/v1/") ? session : {
      name: "box", persistent: false, createdAt: 1, updatedAt: 1, currentSessionId: "sbx_1", status: "running",
    };
    res.setHeader("content-type", "application/json");
    res.end(JSON.stringify({ sandbox, session, routes }));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    requests,
    close: () => new Promise((resolve) => { server.close(resolve); server.closeAllConnections(); }),
  };
}

/** A token of three parts, as VERCEL_OIDC_TOKEN must be. */
export function jwt() {
  const part = (v) => Buffer.from(JSON.stringify(v)).toString("base64url");
  return `${part({ alg: "none", typ: "JWT" })}.${part({ owner_id: "team_jwt", project_id: "prj_jwt" })}.c2VjcmV0`;
}
