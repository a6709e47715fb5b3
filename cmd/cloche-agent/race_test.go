//go:build race

package main

// raceEnabled: loads are smaller under the race detector.
const raceEnabled = true
