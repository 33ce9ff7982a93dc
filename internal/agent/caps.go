package agent

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// childCaps are the capabilities that commands may have: Docker's default set.
// The agent itself may be given more, to set the host name and the clock.
const childCaps = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FSETID | 1<<unix.CAP_FOWNER |
	1<<unix.CAP_MKNOD | 1<<unix.CAP_NET_RAW | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETFCAP |
	1<<unix.CAP_SETPCAP | 1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_SYS_CHROOT | 1<<unix.CAP_KILL | 1<<unix.CAP_AUDIT_WRITE

// KeepCapabilitiesFromChildren takes from all threads what would let a program
// that they start have more capabilities than Docker's default set. What the
// process itself may do does not change. It must be called before the first
// program is started.
func KeepCapabilitiesFromChildren() error {
	have, err := capabilities()
	if err != nil {
		return err
	}
	for n := 0; n < 64; n++ {
		if have["CapBnd"]&^childCaps&(1<<n) == 0 {
			continue
		}
		if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(n), 0); errno != 0 {
			return fmt.Errorf("drop capability %d from the bounding set: %w", n, errno)
		}
	}
	if have["CapAmb"] != 0 {
		if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0); errno != 0 {
			return fmt.Errorf("clear the ambient capabilities: %w", errno)
		}
	}
	if have["CapInh"]&^childCaps == 0 {
		return nil
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for i := range data {
		shift := 32 * i
		data[i] = unix.CapUserData{
			Effective: uint32(have["CapEff"] >> shift), Permitted: uint32(have["CapPrm"] >> shift),
			Inheritable: uint32((have["CapInh"] & childCaps) >> shift),
		}
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 {
		return fmt.Errorf("reduce the inheritable capabilities: %w", errno)
	}
	return nil
}

// capabilities reads our own sets, by the names that /proc gives them.
func capabilities() (map[string]uint64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, fmt.Errorf("read our capabilities: %w", err)
	}
	sets := map[string]uint64{}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if strings.HasPrefix(name, "Cap") {
			if sets[name], err = strconv.ParseUint(strings.TrimSpace(value), 16, 64); err != nil {
				return nil, fmt.Errorf("read our capabilities: %q: %w", line, err)
			}
		}
	}
	return sets, nil
}
