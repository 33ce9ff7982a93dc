package proc

import (
	"os"
	"strconv"
	"strings"
	"syscall"
)

// signalAll sends a signal to all that Run waits for: as process 1 everything
// there is, else our children, whoever their parents were.
func signalAll(sig syscall.Signal) {
	if os.Getpid() == 1 {
		syscall.Kill(-1, sig)
		return
	}
	for _, pid := range children(os.Getpid()) {
		if syscall.Kill(-pid, sig) != nil {
			syscall.Kill(pid, sig)
		}
	}
}

// children lists the processes whose parent is pid.
func children(pid int) []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	var list []int
	for _, name := range names {
		n, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err == nil && parent(string(stat)) == pid {
			list = append(list, n)
		}
	}
	return list
}

// parent reads the parent out of /proc/PID/stat. The program's name in it may
// hold anything, brackets too.
func parent(stat string) int {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return 0
	}
	ppid, err := strconv.Atoi(fields[1])
	if err != nil {
		return 0
	}
	return ppid
}
