package vercel

import (
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche/internal/sdktest"
)

// TestSDK runs the official SDKs against the API. What they reject, throws.
func TestSDK(t *testing.T) {
	for _, version := range sdktest.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			dir := sdktest.Install(t, version)
			server := httptest.NewServer(New(Config{
				Service: newFake(t), Authenticator: testTokens,
				// Signs of life must not disturb any answer. One wait of the
				// program is longer than HeadersWithin; a failure must not be.
				Heartbeat: 20 * time.Millisecond, HeadersWithin: time.Second,
			}))
			t.Cleanup(server.Close)
			program := "testdata/sdk/v3.mjs"
			if strings.HasPrefix(version, "1.") {
				program = "testdata/sdk/v1.mjs"
			}
			c := exec.CommandContext(t.Context(), "node", program)
			c.Env = append(os.Environ(), "SDK_DIR="+dir, "BASE="+server.URL)
			out, err := c.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}
