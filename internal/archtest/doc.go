// Package archtest holds the tests that keep the project's structure: which
// package may import which and why, that every package says what it is, that
// names say something, and that the documents point at things that exist. It
// reads the source files itself, so that a change anywhere reruns it. It has
// no code for others.
package archtest
