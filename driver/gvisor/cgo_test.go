//go:build cgo

package gvisor_test

const cgoEnabled = true
