#!/usr/bin/python3
# Stands where the agent's helper is: it keeps the pipes that it should hand over.
import os, sys, json, struct, time
mode = open('/tmp/mode').read().strip()
if os.fork(): os._exit(0)
os.setsid()
r, w = 0, 1
def put(b):
    v = memoryview(b)
    while v: v = v[os.write(w, v):]
def frame(t, f, s, p=b''): return struct.pack('>I', len(p))[1:] + bytes([t, f]) + struct.pack('>I', s) + p
line = b''
while not line.endswith(b'\n'):
    c = os.read(r, 1)
    if not c: os._exit(0)
    line += c
hello = json.loads(line[7:])
log = open('/tmp/evil.log', 'a')
print(mode, hello['min'], file=log, flush=True)
if mode == 'silent': time.sleep(1000)
if mode == 'stale':
    while True: put(b'cloche ' + hello['nonce'].encode() + b'\n' * 65000)
if mode == 'refuse': os._exit(0)
put(b'cloche ' + json.dumps({'nonce': hello['nonce'], 'version': 1, 'agent': 'x' * 3000}).encode() + b'\n')
buf = b''
def need(n):
    global buf
    while len(buf) < n:
        c = os.read(r, 65536)
        if not c: os._exit(0)
        buf += c
    b, buf = buf[:n], buf[n:]
    return b
need(24)
put(frame(4, 0, 0))
def spam(b, n=4000):
    b = b * n
    while True: put(b)
if mode == 'ping': spam(frame(6, 0, 0, b'12345678'))
if mode == 'settings': spam(frame(4, 0, 0))
if mode == 'unknown': spam(frame(0x77, 0, 0))
if mode == 'window': spam(frame(8, 0, 0, struct.pack('>I', 1)))
if mode == 'goaway': put(frame(7, 0, 0, struct.pack('>II', 0, 0)))
def agent(t, p): return bytes([t]) + struct.pack('>I', len(p)) + p
def body(s, b, end=False):
    while True:
        put(frame(0, 1 if end and len(b) <= 16000 else 0, s, b[:16000]))
        b = b[16000:]
        if not b: break
first = True
ids = []
while True:
    h = need(9)
    n, t, f, s = int.from_bytes(h[:3], 'big'), h[3], h[4], int.from_bytes(h[5:], 'big')
    p = need(n)
    print('frame', t, f, s, n, file=log, flush=True)
    if t == 6 and not f & 1: put(frame(6, 1, 0, p))
    if t == 4 and not f & 1: put(frame(4, 1, 0))
    if t != 1: continue
    # HEADERS: the first request after a restart is GET /v1/commands.
    if mode == 'noanswer': continue
    if mode == 'headers':
        put(frame(1, 0, s, b'\x88'))
        spam(frame(9, 0, s, b'\x00\x01a' + b'\x7f\x80\x7e' + b'b' * 255))
    if mode == '1xx':
        spam(frame(1, 4, s, b'\x08\x03100'))
    if mode == 'rst': put(frame(3, 0, s, struct.pack('>I', 2))); continue
    put(frame(1, 4, s, b'\x88'))
    if first:
        first = False
        if mode == 'json': spam(frame(0, 0, s, b'[' * 16000), 4)
        if mode == 'deep': body(s, b'[' * 4000000, True); continue
        if mode == 'ids':
            body(s, json.dumps([{'id': '../../../' + 'x' * 40 + str(i), 'started': {}} for i in range(30000)]).encode(), True); continue
        cmds = open('/tmp/cmds').read().split()
        body(s, json.dumps([{'id': c, 'started': {}} for c in cmds]).encode(), True)
        continue
    st = {'pid': 1, 'startedAt': '2026-01-01T00:00:00Z', 'workDir': '/', 'offset': 0, 'stdin': 0}
    if mode == 'break': put(frame(0, 1, s)); continue
    if mode == 'gap':
        st['offset'] = int(time.time() * 1e6)
        body(s, agent(16, json.dumps(st).encode()), True); continue
    body(s, agent(16, json.dumps(st).encode()))
    if mode == 'zero': spam(frame(0, 0, s))
    if mode == 'empty': spam(frame(0, 0, s, agent(17, b'') * 3000), 10)
    if mode == 'flood': spam(frame(0, 0, s, agent(17, b'y' * 16000)), 10)
    if mode == 'ack': spam(frame(0, 0, s, (agent(21, b'\0' * 8)) * 1000), 10)
    if mode == 'exit':
        body(s, agent(19, json.dumps({'code': 1 << 40, 'signal': -9, 'cause': 'x' * 1000}).encode()), True)
