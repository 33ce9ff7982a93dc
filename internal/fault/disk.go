package fault

import (
	"errors"
	"syscall"
)

// DiskFull reports whether an error says that no room is left on a disk, or
// none within a quota.
func DiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}
