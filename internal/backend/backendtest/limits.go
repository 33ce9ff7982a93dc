package backendtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// tight are limits that a test goes over quickly.
var tight = sandbox.Limits{CPU: 0.5, MemoryMB: 128, DiskMB: 64, PIDs: 48}

// testLimitsVisible wants programs inside to find their memory and CPU limits
// in one of the places where runtimes and build tools look for them.
func testLimitsVisible(e *env) { limitsVisible(e.create(usual)) }

func limitsVisible(m *machine) {
	m.Helper()
	limits := m.cfg.Limits
	memory := m.shell("cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1 * 1024/p' /proc/meminfo")
	if !anyNear(string(memory.Stdout), float64(limits.MemoryMB<<20)) {
		m.Errorf("no place shows the memory limit of %d MiB: %q", limits.MemoryMB, memory.Stdout)
	}
	cpu := m.shell("sed 's/ / \\/ /' /sys/fs/cgroup/cpu.max 2>/dev/null; q=$(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null) && echo $q / $(cat /sys/fs/cgroup/cpu/cpu.cfs_period_us); nproc")
	if !anyNear(string(cpu.Stdout), limits.CPU) {
		m.Errorf("no place shows the limit of %v CPUs: %q", limits.CPU, cpu.Stdout)
	}
}

// anyNear reports whether a line of "number", "number * number" or "number /
// number" is within a tenth of want.
func anyNear(lines string, want float64) bool {
	for line := range strings.Lines(lines) {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		got, err := strconv.ParseFloat(f[0], 64)
		if err == nil && len(f) == 3 {
			by, berr := strconv.ParseFloat(f[2], 64)
			if f[1] == "*" {
				got *= by
			} else {
				got /= by
			}
			err = berr
		}
		if err == nil && got > 0.9*want && got < 1.1*want {
			return true
		}
	}
	return false
}

// testMemoryLimit goes over the memory limit. What is killed for it is the
// command, or the machine, which then says why.
func testMemoryLimit(e *env) { memoryLimit(e.create(tight)) }

func memoryLimit(m *machine) {
	m.Helper()
	e := m.env
	if res := m.shell("dd if=/dev/zero of=/dev/null bs=32M count=1"); res.ExitCode != 0 {
		e.Fatalf("32 MiB of %d: %+v %s", tight.MemoryMB, res, res.Stderr)
	}
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	res, err := m.client.Run(ctx, agentclient.Shell(fmt.Sprintf("exec dd if=/dev/zero of=/dev/null bs=%dM count=1", 2*tight.MemoryMB)))
	if e.kind.OutOfMemoryEnds {
		if err == nil {
			e.Fatalf("a command of twice the memory ended with %+v", res)
		}
		if exit := m.wait(); !exit.OutOfMemory {
			e.Errorf("the machine ended for its memory and says %+v", exit)
		}
		return
	}
	if err != nil || res.Signal != syscall.SIGKILL {
		e.Errorf("a command of twice the memory: %+v, %v", res, err)
	}
	m.works()
	// Memory that is nobody's: with no process to blame, the agent goes too.
	m.fillShared()
	if exit := m.wait(); !exit.OutOfMemory {
		e.Errorf("the machine ended for its memory and says %+v", exit)
	}
}

// fillShared fills the memory with files that no process has open.
func (m *machine) fillShared() {
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	line := "for dir in /dev/shm /dev; do dd if=/dev/zero of=$dir/fill bs=1M; done"
	for ctx.Err() == nil {
		if _, err := m.client.Run(ctx, agentclient.Shell(line)); err != nil {
			return // the machine ended, which the caller looks at
		}
	}
}

// testDiskLimit fills the disk: there is as much room as was asked for, and no
// more, and afterwards the machine works.
func testDiskLimit(e *env) { diskLimit(e.create(tight), 0) }

// diskLimit takes a machine with tight limits, whose files already have some
// bytes.
func diskLimit(m *machine, used int64) {
	m.Helper()
	e := m.env
	res := m.shell("dd if=/dev/zero of=/fill bs=1M count=1000")
	if !bytes.Contains(res.Stderr, []byte("No space left on device")) || res.ExitCode == 0 {
		e.Errorf("writing a file of 1000 MiB: exit code %d, %q", res.ExitCode, res.Stderr)
	}
	size, err := strconv.ParseInt(strings.TrimSpace(string(m.shell("stat -c %s /fill").Stdout)), 10, 64)
	if err != nil {
		e.Fatal(err)
	}
	if limit := tight.DiskMB << 20; size+used < limit*95/100 || size+used > limit*105/100 {
		e.Errorf("%d bytes could be written beside %d, the limit is %d", size, used, limit)
	}
	m.want("rm /fill && dd if=/dev/zero of=/again bs=1M count=16 2>/dev/null && echo ok", "ok\n")
}

// testPIDsLimit starts more processes than there may be.
func testPIDsLimit(e *env) { pidsLimit(e.create(tight)) }

func pidsLimit(m *machine) {
	m.Helper()
	e := m.env
	res := m.shell(fmt.Sprintf("for i in $(seq %d); do sleep 1000 >/dev/null 2>&1 & done", 2*tight.PIDs))
	if !bytes.Contains(res.Stderr, []byte("fork")) || res.ExitCode == 0 {
		e.Errorf("starting %d processes: exit code %d, %q", 2*tight.PIDs, res.ExitCode, res.Stderr)
	}
	u, err := m.instance.Usage(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	if !e.kind.OutOfMemoryEnds && u.PIDs > tight.PIDs {
		e.Errorf("%d processes run, the limit is %d", u.PIDs, tight.PIDs)
	}
	m.destroy()
}

// testCPULimit computes for a second and measures from outside.
func testCPULimit(e *env) { cpuLimit(e.create(tight)) }

func cpuLimit(m *machine) {
	m.Helper()
	e := m.env
	before, err := m.instance.Usage(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	begin := time.Now()
	m.shell("timeout 2 sh -c 'while :; do :; done'")
	after, err := m.instance.Usage(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	share := float64(after.CPU-before.CPU) / float64(time.Since(begin))
	if share > 1.4*tight.CPU {
		e.Errorf("%.2f CPUs were used, the limit is %v", share, tight.CPU)
	}
	if share < 0.2*tight.CPU {
		e.Errorf("a busy loop used %.2f CPUs only", share)
	}
}

// testUsage looks whether the measures move as they should.
func testUsage(e *env) {
	m := e.create(usual)
	before, err := m.instance.Usage(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	if !e.kind.Simulated && (before.CPU <= 0 || before.MemoryBytes < 1<<20 || before.MemoryBytes > usual.MemoryMB<<20 || before.PIDs < 1) {
		e.Errorf("usage of an idle machine: %+v", before)
	}
	if before.DiskBytes < 0 || before.DiskBytes > 8<<20 {
		e.Errorf("an unused disk uses %d bytes", before.DiskBytes)
	}
	const size = 24 << 20
	if err := m.client.WriteBytes(e.ctx, agentclient.File{Path: "/tmp/data"}, make([]byte, size)); err != nil {
		e.Fatal(err)
	}
	if !e.kind.Simulated {
		m.shell("sync")
	}
	after, err := m.instance.Usage(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	if grown := after.DiskBytes - before.DiskBytes; grown < size*9/10 || grown > size*12/10 {
		e.Errorf("after %d bytes were written the disk uses %d more", size, grown)
	}
	if after.CPU < before.CPU {
		e.Errorf("CPU time went from %v to %v", before.CPU, after.CPU)
	}
	e.kind.Crash(e.TB, m.instance.Handle())
	m.wait()
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	if _, err := m.instance.Usage(ctx); errors.Is(err, context.DeadlineExceeded) {
		e.Errorf("usage of a machine that died hangs: %v", err)
	}
}
