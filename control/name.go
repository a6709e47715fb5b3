package control

import (
	"crypto/rand"
	"math/big"
	"strings"
)

var (
	adjectives = strings.Fields(`amber brave brisk calm clear cosy crisp deep early fair fine free fresh gentle
		glad golden grand green happy keen kind light lively lucid mellow mild neat noble plain prime proud quick
		quiet rapid ready round sharp silver smooth solid spry still sunny swift tidy warm wide wise young zesty`)
	nouns = strings.Fields(`acorn badger bay beacon birch brook cedar cliff cloud comet coral cove crane delta dune
		elm falcon fern finch fjord glade grove harbor heron hill iris island lagoon lake lark maple meadow moon
		moss oak otter owl pebble pine pond reef river robin sage shore spruce stone thrush tide willow wren`)
)

// newName makes a name up: two words to recognize it by and 20 random bits.
func newName() string {
	return pick(adjectives) + "-" + pick(nouns) + "-" + strings.ToLower(rand.Text()[:4])
}

func pick(words []string) string {
	i, err := rand.Int(rand.Reader, big.NewInt(int64(len(words))))
	if err != nil {
		panic("crypto/rand: " + err.Error()) // documented never to fail
	}
	return words[i.Int64()]
}
