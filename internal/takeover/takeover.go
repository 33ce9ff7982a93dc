// Package takeover takes what one process at a time may have, as a lock, an address
// or a queue of the kernel, from a process that was killed. Its children may
// have its files open for a moment longer: one that it was just starting
// inherits all of them and closes them when it executes its program. It takes
// nothing from a process that lives.
package takeover

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Patience is how long to wait for such children.
	Patience = 5 * time.Second
	again    = 10 * time.Millisecond
)

// ErrHeld is the error of Lock when another process has the lock.
var ErrHeld = errors.New("another process holds the lock")

// Wait calls take until it fails with none of the busy errors, for up to the
// patience. It returns what the last call did.
func Wait(patience time.Duration, take func() error, busy ...syscall.Errno) error {
	begin := time.Now()
	for {
		err := take()
		if !isAny(err, busy) || time.Since(begin) > patience {
			return err
		}
		time.Sleep(again)
	}
}

func isAny(err error, busy []syscall.Errno) bool {
	for _, b := range busy {
		if errors.Is(err, b) {
			return true
		}
	}
	return false
}

// Lock takes the lock on a file, which it makes if need be, and waits for it up
// to the patience. The lock is held until the file is closed.
func Lock(path string, patience time.Duration) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = Wait(patience, func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }, unix.EWOULDBLOCK, unix.EINTR)
	if err == nil {
		return f, nil
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrHeld
	}
	return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
}
