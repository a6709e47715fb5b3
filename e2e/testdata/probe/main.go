// Command probe says what it is run as. It is static: an image needs nothing
// else.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	in, err := io.ReadAll(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, "read standard input:", err)
		os.Exit(1)
	}
	cwd, err := os.Getwd()
	if err != nil {
		fmt.Fprintln(os.Stderr, "working directory:", err)
		os.Exit(1)
	}
	env := map[string]string{}
	for _, kv := range os.Environ() {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	if err := json.NewEncoder(os.Stdout).Encode(map[string]any{
		"UID": os.Getuid(), "GID": os.Getgid(), "Dir": cwd, "Env": env, "Args": os.Args[1:], "Stdin": string(in),
	}); err != nil {
		os.Exit(1)
	}
}
