package machine

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The KVM calls and numbers that CheckKVM needs, from the kernel's linux/kvm.h.
const (
	kvmCreateVM            = 0xAE01
	kvmGetVCPUMmapSize     = 0xAE04
	kvmCreateVCPU          = 0xAE41
	kvmSetUserMemoryRegion = 0x4020AE46
	kvmRun                 = 0xAE80
	kvmSetRegs             = 0x4090AE82
	kvmGetSregs            = 0x8138AE83
	kvmSetSregs            = 0x4138AE84

	kvmExitHLT       = 5
	exitReasonOffset = 8 // of exit_reason in struct kvm_run
	csBaseOffset     = 0 // of cs.base in struct kvm_sregs
	csSelectorOffset = 12
	ripOffset        = 16 * 8 // of rip in struct kvm_regs
	rflagsOffset     = 17 * 8
)

// errGuest says that a guest was made and did not run as it should.
var errGuest = errors.New("this /dev/kvm cannot run a guest")

// program counts ecx down from 50 million and halts. On a processor with
// virtualization that takes some 20 ms. A KVM that only interprets what a guest
// does, such as a paravirtual one given an ordinary guest, needs minutes.
var program = []byte{
	0x66, 0xB9, 0x80, 0xF0, 0xFA, 0x02, // mov ecx, 50000000
	0x66, 0x49, // dec ecx
	0x75, 0xFC, // jnz to the dec
	0xF4, // hlt
}

// guestTime is how long the program may take; a busy host needs some room.
const guestTime = 2 * time.Second

// CheckKVM makes a guest of one processor and one page, and has it run a
// short program. A device file alone proves nothing: some hosts hand out a
// /dev/kvm that opens, makes guests and cannot run an ordinary one.
func CheckKVM() error {
	kvm, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return errors.New("there is no /dev/kvm: this processor has no virtualization, or it is switched off in the firmware or by the cloud")
	}
	if err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	defer kvm.Close()
	result := make(chan error, 1)
	// A guest that never stops would hold its thread for ever, so the thread
	// is this goroutine's own and is interrupted when time is up.
	tid := make(chan int, 1)
	var late atomic.Bool
	go func() {
		runtime.LockOSThread()
		tid <- unix.Gettid()
		result <- runGuest(int(kvm.Fd()), &late)
	}()
	id := <-tid
	timer := time.NewTimer(guestTime)
	defer timer.Stop()
	for {
		select {
		case err := <-result:
			if errors.Is(err, errLate) {
				return fmt.Errorf("%w: a program of 20 ms did not end within %s, so its instructions are interpreted one by one", errGuest, guestTime)
			}
			return err
		case <-timer.C:
			late.Store(true)
			// SIGURG is what the Go runtime itself interrupts threads with. One
			// that comes between two calls interrupts nothing, hence the repeat.
			if err := unix.Tgkill(unix.Getpid(), id, unix.SIGURG); err != nil {
				return fmt.Errorf("%w: its thread could not be interrupted: %w", errGuest, err)
			}
			timer.Reset(10 * time.Millisecond)
		}
	}
}

func ioctl(fd int, call, arg uintptr) (int, error) {
	r, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), call, arg)
	if e != 0 {
		return 0, e
	}
	return int(r), nil
}

// errLate says that a guest was interrupted because its time was up.
var errLate = errors.New("interrupted")

// runGuest runs the program in a guest, until it halts or late is set and the
// thread interrupted.
func runGuest(kvm int, late *atomic.Bool) error {
	vm, err := ioctl(kvm, kvmCreateVM, 0)
	if err != nil {
		return fmt.Errorf("%w: make it: %w", errGuest, err)
	}
	defer unix.Close(vm)
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("allocate guest memory: %w", err)
	}
	defer unix.Munmap(page)
	copy(page, program)
	region := struct {
		slot, flags            uint32
		guest, size, userspace uint64
	}{guest: 0x1000, size: 4096, userspace: uint64(uintptr(unsafe.Pointer(&page[0])))}
	if _, err := ioctl(vm, kvmSetUserMemoryRegion, uintptr(unsafe.Pointer(&region))); err != nil {
		return fmt.Errorf("%w: give it memory: %w", errGuest, err)
	}
	vcpu, err := ioctl(vm, kvmCreateVCPU, 0)
	if err != nil {
		return fmt.Errorf("%w: give it a processor: %w", errGuest, err)
	}
	defer unix.Close(vcpu)
	size, err := ioctl(kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return fmt.Errorf("%w: size of its run page: %w", errGuest, err)
	}
	run, err := unix.Mmap(vcpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("%w: map its run page: %w", errGuest, err)
	}
	defer unix.Munmap(run)
	if err := startAt(vcpu, 0x1000); err != nil {
		return err
	}
	for {
		_, err := ioctl(vcpu, kvmRun, 0)
		if errors.Is(err, unix.EINTR) {
			if late.Load() {
				return errLate
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: run it: %w", errGuest, err)
		}
		if reason := *(*uint32)(unsafe.Pointer(&run[exitReasonOffset])); reason != kvmExitHLT {
			return fmt.Errorf("%w: it ended with exit reason %d instead of a halt", errGuest, reason)
		}
		return nil
	}
}

// startAt sets a processor, in real mode, to an address.
func startAt(vcpu int, addr uint64) error {
	var sregs [0x138]byte
	if _, err := ioctl(vcpu, kvmGetSregs, uintptr(unsafe.Pointer(&sregs[0]))); err != nil {
		return fmt.Errorf("%w: read its registers: %w", errGuest, err)
	}
	*(*uint64)(unsafe.Pointer(&sregs[csBaseOffset])) = 0
	*(*uint16)(unsafe.Pointer(&sregs[csSelectorOffset])) = 0
	if _, err := ioctl(vcpu, kvmSetSregs, uintptr(unsafe.Pointer(&sregs[0]))); err != nil {
		return fmt.Errorf("%w: set its segment registers: %w", errGuest, err)
	}
	var regs [0x90]byte
	*(*uint64)(unsafe.Pointer(&regs[ripOffset])) = addr
	*(*uint64)(unsafe.Pointer(&regs[rflagsOffset])) = 2 // the bit that is always set
	if _, err := ioctl(vcpu, kvmSetRegs, uintptr(unsafe.Pointer(&regs[0]))); err != nil {
		return fmt.Errorf("%w: set its registers: %w", errGuest, err)
	}
	return nil
}
