// The number of threads is set in run; else the runtime would keep looking at
// the machine's cgroups for it.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command opendsec-agent is the server inside every sandbox. As process 1 it
// keeps the machine that it runs in; started otherwise, it only serves.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kernflux/opendsec/internal/agent"
)

// version is set when the program is built for a release.
var version = "dev"

func main() {
	started := time.Now()
	listen := flag.String("listen", "0.0.0.0:"+strconv.Itoa(agent.Port), "`address` to serve on: HOST:PORT, or unix:PATH")
	flag.Parse()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := run(log, *listen, started); err != nil {
		fmt.Fprintln(os.Stderr, "opendsec-agent:", err)
		os.Exit(1)
	}
}

// spareThreads is how many threads are made ahead: some for system calls that
// block, such as the start of a process, while calls go on being answered.
const spareThreads = 8

func run(log *slog.Logger, listen string, started time.Time) error {
	l, err := listenOn(listen) // first, so that callers can connect
	if err != nil {
		return err
	}

	// Every sandbox pays for this process, so it stays small: a heap that is
	// collected early, and few threads. One that runs Go code is also the
	// fastest where a wake-up of another is dear, as in gVisor; a big machine
	// gets a second, for transfers side by side.
	runtime.GOMAXPROCS(1 + min(1, runtime.NumCPU()/8))
	debug.SetGCPercent(50)
	syscall.Umask(0o022)

	machine := os.Getpid() == 1
	if machine {
		go agent.ReserveThreads(spareThreads)
		if err := agent.KeepCapabilitiesFromChildren(); err != nil {
			log.Warn("commands may have more capabilities than they should", "error", err)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	if machine { // no process inside ends the machine by a polite signal
		stop()
		// Caught and dropped: what is ignored would be ignored by all commands too.
		signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP)
		ctx, stop = context.WithCancel(context.Background())
	}
	defer stop()
	return agent.New(agent.Config{Log: log, Version: version, Machine: machine}, started).Run(ctx, l)
}

// listenOn listens on an address. A peer that vanishes without a word is
// noticed after some minutes; more often would wake idle machines.
func listenOn(address string) (net.Listener, error) {
	network := "tcp4"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", path
	}
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Minute, Interval: time.Minute, Count: 3}}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), network, address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return l, nil
}
