package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestPathTricks: no spelling of a path reaches anything without a token, and
// none is answered by a redirect.
func TestPathTricks(t *testing.T) {
	s := newServer(t)
	for _, target := range []string{
		"//v2/sandboxes", "/v2//sandboxes", "/api/../v2/sandboxes", "/healthz/../metrics", "/metrics/../v2/sandboxes", "/v2/%2e%2e/metrics",
		"/v2/sandboxes/..%2f..%2fmetrics", "/v2/sandboxes/%00", "//evil.example/%2e%2e", "/metrics/", "/healthz/x", "*",
	} {
		for _, method := range []string{"GET", "POST", "CONNECT", "TRACE"} {
			status, body := rawRequest(t, s, method+" "+target+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			if status < 400 || strings.Contains(body, "cloche_") || strings.Contains(body, `"sandboxes"`) {
				t.Errorf("%s %s: %d %.200s", method, target, status, body)
			}
		}
	}
	for _, r := range []string{
		"POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
		"DELETE /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
	} {
		if status, body := rawRequest(t, s, r); status < 400 {
			t.Errorf("%.20q: %d %.100s", r, status, body)
		}
	}
}

// rawRequest sends bytes and returns the first answer.
func rawRequest(t *testing.T, s *server, request string) (int, string) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	check(t, err)
	defer conn.Close()
	check(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = fmt.Fprint(conn, request)
	check(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%.60q: %v", request, err)
	}
	defer resp.Body.Close()
	var b strings.Builder
	_, err = bufio.NewReader(resp.Body).WriteTo(&b)
	check(t, err)
	return resp.StatusCode, b.String()
}
