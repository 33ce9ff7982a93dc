package dnsproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	lookAgain = time.Second      // how often resolv.conf is looked at, at most
	sulk      = 10 * time.Second // how long an upstream that failed comes last
	rounds    = 3                // how often each upstream is asked, at most
)

// ParseUpstream reads a resolver's address, "ADDR" or "ADDR:PORT", an IPv6 one
// with a port in brackets. The default port is 53.
func ParseUpstream(s string) (netip.AddrPort, error) {
	if addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil {
		return netip.AddrPortFrom(addr.Unmap(), 53), nil
	}
	ap, err := netip.ParseAddrPort(s)
	if err != nil || ap.Port() == 0 {
		return netip.AddrPort{}, fmt.Errorf("resolver %.100q: want ADDR or ADDR:PORT, such as 192.0.2.53 or [2001:db8::53]:5353", s)
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

// upstreams are the resolvers to ask.
type upstreams struct {
	log      *slog.Logger
	file     string // "" if they are fixed
	patience time.Duration

	mu     sync.Mutex
	all    []*upstream
	looked time.Time
	seen   fileState
	wrong  string // with the file, said already
}

// fileState tells one version of a file from another.
type fileState struct {
	mod  time.Time
	size int64
	sys  fs.FileInfo
}

func newUpstreams(log *slog.Logger, cfg Config) (*upstreams, error) {
	us := &upstreams{log: log, patience: cfg.Patience}
	if len(cfg.Upstreams) == 0 {
		us.file = cfg.ResolvConf
		return us, nil
	}
	for _, s := range cfg.Upstreams {
		addr, err := ParseUpstream(s)
		if err != nil {
			return nil, err
		}
		us.all = append(us.all, &upstream{addr: addr})
	}
	return us, nil
}

// current returns the resolvers, those first that did not fail lately.
func (us *upstreams) current(now time.Time) []*upstream {
	us.mu.Lock()
	if us.file != "" && now.Sub(us.looked) >= lookAgain {
		us.looked = now
		us.reload()
	}
	all := slices.Clone(us.all)
	us.mu.Unlock()
	until := func(u *upstream) int64 {
		if t := u.badUntil.Load(); t > now.UnixNano() {
			return t
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b *upstream) int { return cmp.Compare(until(a), until(b)) })
	return all
}

// reload reads the file if it is another than the last time. While it cannot be
// read, the resolvers stay as they are.
func (us *upstreams) reload() {
	info, err := os.Stat(us.file)
	if err == nil && us.seen.sys != nil && os.SameFile(info, us.seen.sys) && info.ModTime().Equal(us.seen.mod) && info.Size() == us.seen.size {
		return
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(us.file)
	}
	if err != nil {
		if us.wrong != err.Error() {
			us.wrong = err.Error()
			us.log.Warn("cannot read which resolvers to ask", "file", us.file, "error", err)
		}
		return
	}
	us.wrong = ""
	us.seen = fileState{info.ModTime(), info.Size(), info}
	known := us.all
	us.all = nil
	for _, addr := range nameservers(string(data)) {
		if i := slices.IndexFunc(known, func(u *upstream) bool { return u.addr == addr }); i >= 0 {
			us.all = append(us.all, known[i])
			continue
		}
		us.all = append(us.all, &upstream{addr: addr})
	}
	us.log.Info("resolvers to ask", "file", us.file, "resolvers", addrsOf(us.all))
}

func addrsOf(all []*upstream) []string {
	var s []string
	for _, u := range all {
		s = append(s, u.addr.String())
	}
	return s
}

// nameservers reads the nameserver lines of a resolv.conf. A file without any
// means the machine itself, as everywhere.
func nameservers(text string) []netip.AddrPort {
	var all []netip.AddrPort
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil {
			all = append(all, netip.AddrPortFrom(addr.Unmap(), 53))
		}
	}
	if len(all) == 0 {
		all = append(all, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 53))
	}
	return all
}

// try is what one upstream said.
type try struct {
	u   *upstream
	msg *dns.Msg
	err error
}

// exchange asks the upstreams for an answer: the first one, and each further one
// when those before it failed or let the patience run out. The first good answer
// wins. An upstream that says it failed is not asked again.
func (us *upstreams) exchange(ctx context.Context, q question) (*dns.Msg, error) {
	order := us.current(time.Now())
	if len(order) == 0 {
		return nil, errors.New("there is no resolver to ask")
	}
	ctx, cancel := context.WithCancel(ctx)
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	tries := make(chan try, rounds*len(order))
	var out []*upstream // asked and not heard of
	asked, bad := 0, map[*upstream]bool{}
	next := func() bool {
		for ; asked < rounds*len(order); asked++ {
			u := order[asked%len(order)]
			if bad[u] {
				continue
			}
			asked++
			out = append(out, u)
			asking.Go(func() {
				m, err := u.exchange(ctx, q)
				tries <- try{u, m, err}
			})
			return true
		}
		return false
	}
	next()
	patience := time.NewTimer(us.patience)
	defer patience.Stop()
	var last try
	for {
		select {
		case <-ctx.Done():
			if ctx.Err() == context.DeadlineExceeded {
				us.failed(out)
			}
			return nil, fmt.Errorf("no resolver answered in time: %w", errors.Join(last.err, context.Cause(ctx)))
		case <-patience.C:
			next()
			patience.Reset(us.patience)
		case t := <-tries:
			out = slices.Delete(out, slices.Index(out, t.u), slices.Index(out, t.u)+1)
			if t.err == nil && (t.msg.Rcode == dns.RcodeSuccess || t.msg.Rcode == dns.RcodeNameError) {
				us.failed(slices.DeleteFunc(out, func(u *upstream) bool { return u == t.u }))
				t.u.badUntil.Store(0)
				return t.msg, nil
			}
			bad[t.u] = true
			if t.err != nil && ctx.Err() != context.Canceled { // it is not to blame for who went away
				us.failed([]*upstream{t.u})
			}
			if last.msg == nil {
				last = t
			}
			if !next() && len(out) == 0 {
				return last.msg, last.err
			}
		}
	}
}

// failed puts upstreams last for a while.
func (us *upstreams) failed(all []*upstream) {
	for _, u := range all {
		now := time.Now()
		if u.badUntil.Swap(now.Add(sulk).UnixNano()) < now.UnixNano() {
			us.log.Warn("a resolver does not answer and comes last for a while", "resolver", u.addr)
		}
	}
}
