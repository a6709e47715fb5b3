// What an agent does with code that it does not trust. The SDK is the unmodified
// @vercel/sandbox; CLOCHE_URL and the preload point it at your own server.
import { Sandbox } from "@vercel/sandbox";

const say = (text) => console.log(`\x1b[1m${text}\x1b[0m`);

// Pretend that a model wrote this.
const snippet = `
import json, math, platform
primes = [n for n in range(2, 60) if all(n % d for d in range(2, math.isqrt(n) + 1))]
print(json.dumps({"primes": primes, "python": platform.python_version()}))
`;

process.env.AGENT_API_KEY = "a key that the snippet must never see";

say("1. create a sandbox");
const started = performance.now();
const sandbox = await Sandbox.create({ timeout: 120_000 });
try {
  console.log(`   ${sandbox.name}, ${sandbox.vcpus ?? "?"} vCPUs, ready after ${Math.round(performance.now() - started)} ms`);

  say("2. write what the model wrote, and run it");
  await sandbox.writeFiles([{ path: "snippet.py", content: Buffer.from(snippet) }]);
  const result = await sandbox.runCommand("python3", ["snippet.py"]);
  console.log(`   exit ${result.exitCode}: ${(await result.stdout()).trim()}`);

  say("3. stream the output of a longer one");
  const longer = await sandbox.runCommand({
    cmd: "bash",
    args: ["-c", "for i in 1 2 3 4 5; do echo tick $i on $(nproc) CPUs; sleep 0.3; done"],
    detached: true,
  });
  for await (const line of longer.logs()) process.stdout.write(`   ${line.stream}: ${line.data}`);
  console.log(`   exit ${(await longer.wait()).exitCode}`);

  say("4. an infinite loop meets its timeout");
  const loop = await sandbox.runCommand("sh", ["-c", "while true; do :; done"], { timeoutMs: 1_500 });
  console.log(`   exit ${loop.exitCode} after ${loop.durationMs ?? "?"} ms (137 = killed)`);

  say("5. it looks for the keys of the host");
  const spy = await sandbox.runCommand("sh", ["-c", "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; ls -a /root /home 2>&1"]);
  const seen = (await spy.stdout()).includes(process.env.AGENT_API_KEY);
  console.log(`   ${seen ? "IT SAW THE KEY" : "nothing of the host in " + (await spy.stdout()).length + " bytes of environment"}`);
  if (seen || result.exitCode !== 0 || loop.exitCode !== 137) process.exitCode = 1;
} finally {
  say("6. stop: the machine and its files are gone");
  await sandbox.stop();
}
