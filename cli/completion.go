package cli

import (
	"context"
	_ "embed" // the scripts
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/cloche-dev/cloche/client"
)

// The scripts call `cloche __complete -- WORDS`, whose last word is the one
// under the cursor, and offer what it prints: a candidate a line, and a tab and
// a description behind it.
var (
	//go:embed completion/cloche.bash
	completionBash string
	//go:embed completion/cloche.zsh
	completionZsh string
	//go:embed completion/cloche.fish
	completionFish string
)

// completionCmd is `cloche completion`.
type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help is the text below the flags.
func (c *completionCmd) Help() string {
	return `It completes commands, flags and the names of your sandboxes.

To have it in this shell:
  source <(cloche completion bash)
  source <(cloche completion zsh)
  cloche completion fish | source

To keep it:
  cloche completion bash > /etc/bash_completion.d/cloche
  cloche completion zsh > "${fpath[1]}/_cloche"
  cloche completion fish > ~/.config/fish/completions/cloche.fish`
}

// Run prints the script.
func (c *completionCmd) Run(env *Env) error {
	script := map[string]string{"bash": completionBash, "zsh": completionZsh, "fish": completionFish}[c.Shell]
	_, err := fmt.Fprint(env.Stdout, script)
	return err
}

// completeCmd is what the scripts call. It never fails: a person who presses
// the tab key wants no error in the line.
type completeCmd struct {
	Words []string `arg:"" optional:"" passthrough:""`
}

// Run prints the candidates.
func (c *completeCmd) Run(ctx context.Context, k *kong.Context, env *Env) error {
	words := c.Words
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	if len(words) == 0 {
		words = []string{""}
	}
	current := words[len(words)-1]
	for _, m := range candidates(k.Model.Node, words, func() []string { return sandboxNames(ctx, env) }) {
		if strings.HasPrefix(m.word, current) {
			fmt.Fprintf(env.Stdout, "%s\t%s\n", m.word, m.help)
		}
	}
	return nil
}

// candidate is a word that may stand under the cursor.
type candidate struct{ word, help string }

// candidates finds what may stand in place of the last word.
func candidates(node *kong.Node, words []string, sandboxes func() []string) []candidate {
	position := 0
	var value *kong.Flag // whose value comes next
	for _, w := range words[:len(words)-1] {
		switch {
		case value != nil:
			value = nil
		case w == "--":
			return nil // what follows is for the sandbox
		case strings.HasPrefix(w, "-"):
			value = flagOf(node, w)
		default:
			if child := childOf(node, w); child != nil {
				node, position = child, 0
			} else {
				position++
			}
		}
	}
	current := words[len(words)-1]
	switch {
	case value != nil:
		return valuesOf(value.Value, sandboxes)
	case strings.HasPrefix(current, "-"):
		return flagsOf(node)
	}
	var found []candidate
	if position == 0 {
		for _, child := range node.Children {
			if !child.Hidden {
				found = append(found, candidate{child.Name, child.Help})
			}
		}
	}
	if n := len(node.Positional); n > 0 {
		arg := node.Positional[min(position, n-1)]
		if position < n || arg.IsSlice() {
			found = append(found, valuesOf(arg, sandboxes)...)
		}
	}
	return found
}

func childOf(node *kong.Node, word string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == word || slices.Contains(child.Aliases, word) {
			return child
		}
	}
	return nil
}

// flagOf returns the flag of a word if its value is the next word.
func flagOf(node *kong.Node, word string) *kong.Flag {
	for _, group := range node.AllFlags(false) {
		for _, f := range group {
			named := word == "--"+f.Name || f.Short != 0 && word == "-"+string(f.Short)
			if named && !f.IsBool() {
				return f
			}
		}
	}
	return nil
}

func flagsOf(node *kong.Node) []candidate {
	var found []candidate
	for _, group := range node.AllFlags(true) {
		for _, f := range group {
			found = append(found, candidate{"--" + f.Name, f.Help})
		}
	}
	return found
}

// valuesOf are the values of a flag or argument: those of its enum, or what its
// tag "complete" names.
func valuesOf(v *kong.Value, sandboxes func() []string) []candidate {
	var found []candidate
	if v.Enum != "" {
		for _, word := range v.EnumSlice() {
			found = append(found, candidate{word, ""})
		}
	}
	suffix := ""
	switch v.Tag.Get("complete") {
	case "place":
		suffix = ":"
	case "sandbox":
	default:
		return found
	}
	for _, name := range sandboxes() {
		found = append(found, candidate{name + suffix, "sandbox"})
	}
	return found
}

// completionTime is how long the tab key may take.
const completionTime = 2 * time.Second

// sandboxNames are the names of the latest sandboxes, none if the server does
// not answer.
func sandboxNames(ctx context.Context, env *Env) []string {
	c, err := env.Client()
	if err != nil {
		return nil
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	list, _, err := c.Sandboxes(ctx, client.List{Limit: 100})
	if err != nil {
		return nil
	}
	names := make([]string, 0, len(list))
	for _, s := range list {
		names = append(names, s.Name)
	}
	return names
}
