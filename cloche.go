// Package cloche holds the nouns of Cloche: sandboxes, sessions, commands,
// images, principals and policies, their identifiers, the states that a session
// can be in with the one table of allowed transitions, and the closed error
// vocabulary. Every other package may import it; it imports the standard
// library alone and does nothing by itself: no I/O, no goroutines, no state.
package cloche
