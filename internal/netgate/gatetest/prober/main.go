// Prober tries, from inside a sandbox, to get around network rules: each way
// that somebody has thought of. It prints what came of each, and "open" for
// what answered. What reached the world is the world's to say.
//
// With the argument "allowed" it does what the rules allow instead, and fails
// when that does not work; with "again" it does so without asking for names,
// with "forever" it does things of both kinds again and again.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
)

// attempt is a way around the rules. Its result is for a person.
type attempt struct {
	name string
	try  func() (string, error)
}

// moment is how long an attempt waits for an answer.
const moment = 400 * time.Millisecond

// modes are what it does instead of the attempts.
var modes = map[string]func() error{
	"allowed": allowed,
	"again":   again,
	"forever": forever,
}

func main() {
	if len(os.Args) > 1 {
		mode := modes[os.Args[1]]
		if mode == nil {
			fmt.Println("unknown mode", os.Args[1])
			os.Exit(2)
		}
		if err := mode(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("all that is allowed works")
		return
	}
	open := 0
	for i, a := range attempts() {
		at := time.Now()
		got, err := a.try()
		switch {
		case err != nil:
			got = err.Error()
		case strings.Contains(got, gatetest.Banner):
			got = "open: " + got
			open++
		}
		fmt.Printf("%3d %s %s: %.150q\n", i+1, at.Format("15:04:05.000"), a.name, got)
	}
	fmt.Printf("%d attempts, %d open\n", len(attempts()), open)
	if open > 0 {
		os.Exit(1)
	}
}

func attempts() []attempt {
	var all []attempt
	add := func(name string, try func() (string, error)) { all = append(all, attempt{name, try}) }
	// Before anything is resolved.
	add("an allowed name's address without the name", func() (string, error) { return talk("tcp", gatetest.Good+":443", "") })
	addresses(add)
	names(add)
	hellos(add)
	requests(add)
	packets(add)
	return all
}

// allowed does what the rules allow.
func allowed() error {
	var errs []error
	if _, err := lookup("example.com"); err != nil {
		errs = append(errs, err)
	}
	check := func(what, got string, err error) {
		if err != nil || !strings.Contains(got, gatetest.Banner) {
			errs = append(errs, fmt.Errorf("%s: %q, %v", what, got, err))
		}
	}
	got, err := secure(gatetest.Good, "example.com")
	check("TLS", got, err)
	got, err = secure("["+gatetest.Good6+"]", "EXAMPLE.com")
	check("TLS over IPv6", got, err)
	got, err = talk("tcp", gatetest.Good+":80", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
	check("HTTP", got, err)
	got, err = talk("tcp", gatetest.Good+":80", "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET /2 HTTP/1.1\r\nHost: example.com:80\r\nConnection: close\r\n\r\n")
	check("HTTP in chunks, and again", got, err)
	if strings.Count(got, gatetest.Banner) != 2 {
		errs = append(errs, fmt.Errorf("keep-alive: %q", got))
	}
	got, err = talk("tcp", gatetest.Network+":7005", "")
	check("a network", got, err)
	if _, err := lookup("good.wild.example"); err != nil {
		errs = append(errs, err)
	}
	got, err = secure(gatetest.Good, "good.wild.example")
	check("a name below", got, err)
	return errors.Join(errs...)
}

// again goes where a name has led before, and to a network.
func again() error {
	got, err := secure(gatetest.Good, "example.com")
	if err == nil && !strings.Contains(got, gatetest.Banner) {
		err = fmt.Errorf("TLS: %q", got)
	}
	plain, perr := talk("tcp", gatetest.Network+":7005", "")
	if perr == nil && !strings.Contains(plain, gatetest.Banner) {
		perr = fmt.Errorf("a network: %q", plain)
	}
	return errors.Join(err, perr)
}

func forever() error {
	for {
		talk("tcp", gatetest.Network+":7005", "")
		talk("tcp", gatetest.Bad+":80", "GET / HTTP/1.0\r\n\r\n")
		talk("udp", gatetest.Bad+":9999", "evil")
		ask("udp", gateway, "evil.test.", dnsmessage.TypeA)
	}
}

// talk connects, says something if it is not empty, and returns the answer.
func talk(network, addr, say string) (string, error) {
	d := net.Dialer{Timeout: moment}
	c, err := d.Dial(network, addr)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(moment))
	if say != "" {
		if _, err := io.WriteString(c, say); err != nil {
			return "", err
		}
	}
	got, err := io.ReadAll(io.LimitReader(c, 4096))
	if len(got) > 0 {
		return string(got), nil
	}
	return "", err
}

// secure makes a request over TLS.
func secure(host, name string) (string, error) {
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: moment}, Config: &tls.Config{ServerName: name, InsecureSkipVerify: true}}
	ctx, cancel := context.WithTimeout(context.Background(), 4*moment)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", host+":443")
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * moment))
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", name)
	got, err := io.ReadAll(io.LimitReader(c, 4096))
	if len(got) > 0 {
		return string(got), nil
	}
	return "", err
}

// gateway is the resolver that sandboxes are given.
const gateway = "192.0.0.1:53"

func lookup(name string) ([]netip.Addr, error) {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, gateway)
	}}
	ctx, cancel := context.WithTimeout(context.Background(), 5*moment)
	defer cancel()
	return r.LookupNetIP(ctx, "ip", name+".")
}

// addresses tries addresses that no rule opens.
func addresses(add func(string, func() (string, error))) {
	for _, t := range []struct{ what, network, addr string }{
		{"another address", "tcp", gatetest.Bad + ":443"},
		{"another address, plain", "tcp", gatetest.Bad + ":80"},
		{"another address, ssh", "tcp", gatetest.Bad + ":22"},
		{"an allowed name's address on another port", "tcp", gatetest.Good + ":22"},
		{"IPv6", "tcp", "[" + gatetest.Bad6 + "]:443"},
		{"IPv6 of an allowed name on another port", "tcp", "[" + gatetest.Good6 + "]:22"},
		{"a port below a range", "tcp", gatetest.Network + ":6999"},
		{"a port above a range", "tcp", gatetest.Network + ":7011"},
		{"an address beside a network", "tcp", "203.0.114.1:7005"},
		{"a private network", "tcp", gatetest.Private + ":80"},
		{"the metadata service", "tcp", "169.254.169.254:80"},
		{"the metadata service of containers", "tcp", "169.254.170.2:80"},
		{"the metadata service of another cloud", "tcp", "100.100.100.200:80"},
		{"the metadata service over IPv6", "tcp", "[fd00:ec2::254]:80"},
		{"the node", "tcp", gatetest.Node + ":2222"},
		{"the node over IPv6", "tcp", "[" + gatetest.Node6 + "]:2222"},
		{"the gateway's relay", "tcp", "192.0.0.1:1"},
		{"the gateway's other ports", "tcp", "192.0.0.1:2222"},
		{"the gateway over IPv6", "tcp", "[fd5e:c0de:5eed::1]:1"},
		{"address zero", "tcp", "0.0.0.0:2222"},
		{"IPv4 in IPv6", "tcp", "[::ffff:" + gatetest.Bad + "]:443"},
		{"IPv4 through NAT64", "tcp", "[64:ff9b::c633:6414]:443"},
		{"IPv4 through 6to4", "tcp", "[2002:c633:6414::1]:443"},
		{"DNS over TLS", "tcp", gatetest.Good + ":853"},
		{"DNS over TLS elsewhere", "tcp", gatetest.Bad + ":853"},
	} {
		add(t.what, func() (string, error) { return talk(t.network, t.addr, "GET / HTTP/1.0\r\n\r\n") })
	}
	for _, t := range []struct{ what, addr string }{
		{"QUIC", gatetest.Good + ":443"}, {"QUIC over IPv6", "[" + gatetest.Good6 + "]:443"},
		{"UDP to an allowed name's address", gatetest.Good + ":80"}, {"UDP elsewhere", gatetest.Bad + ":9999"},
		{"NTP", gatetest.Bad + ":123"}, {"UDP over IPv6", "[" + gatetest.Bad6 + "]:9999"},
		{"UDP where a rule says TCP", gatetest.Network + ":7005"}, {"DNS over DTLS", gatetest.Good + ":853"},
		{"multicast DNS", "224.0.0.251:5353"}, {"multicast DNS over IPv6", "[ff0e::fb]:5353"},
		{"broadcast", "255.255.255.255:67"}, {"the node's UDP", gatetest.Node + ":161"},
		{"a tunnel's port", gatetest.Bad + ":51820"},
	} {
		add(t.what, func() (string, error) { return talk("udp", t.addr, "anybody there?") })
	}
}

// names tries DNS.
func names(add func(string, func() (string, error))) {
	long := strings.Repeat("a1b2c3d4e5f6g7h8.", 8)
	for _, t := range []struct{ what, server, name string }{
		{"a name that no rule allows", gateway, "evil.test."},
		{"a name that a rule denies", gateway, "denied.wild.example."},
		{"another resolver", gatetest.Bad + ":53", "evil.test."},
		{"the world's resolver", gatetest.Resolver + ":53", "evil.test."},
		{"a resolver over IPv6", "[" + gatetest.Bad6 + "]:53", "evil.test."},
		{"a name with an allowed one in it", gateway, "example.com.evil.test."},
		{"a name that ends like an allowed one", gateway, "evilexample.com."},
		{"data in a name", gateway, long + "wild.example."},
		{"the reverse of an address", gateway, "20.100.51.198.in-addr.arpa."},
	} {
		for _, network := range []string{"udp", "tcp"} {
			add(t.what+" by "+network, func() (string, error) { return ask(network, t.server, t.name, dnsmessage.TypeA) })
		}
	}
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeTXT, dnsmessage.TypeALL, dnsmessage.TypeAXFR, dnsmessage.TypeNS, 65} {
		add(fmt.Sprintf("records of type %d", kind), func() (string, error) { return ask("tcp", gateway, "evil.test.", kind) })
	}
	add("DNS on another port", func() (string, error) { return ask("udp", gatetest.Resolver+":5353", "evil.test.", dnsmessage.TypeA) })
	// Names that lead to what no name may lead to.
	for _, name := range []string{
		"alias", "chain", "loopback", "loopback6", "private", "node", "node6", "metadata", "zero", "mapped", "mapped-local", "nat64", "slot", "multicast",
		"linklocal", "ula", "cgnat",
	} {
		add("a name that leads astray: "+name, func() (string, error) {
			addrs, err := lookup(name + ".wild.example")
			if err != nil {
				return "", err
			}
			return "open: " + gatetest.Banner + fmt.Sprint(addrs), nil
		})
	}
	for _, t := range []struct{ name, addr string }{
		{"private", gatetest.Private + ":443"}, {"node", gatetest.Node + ":2222"}, {"metadata", "169.254.169.254:80"}, {"denied", gatetest.Bad + ":443"},
	} {
		add("the address of a name that leads astray: "+t.name, func() (string, error) { return talk("tcp", t.addr, "GET / HTTP/1.0\r\n\r\n") })
	}
}

// ask asks a resolver, whatever it may answer.
func ask(network, server, name string, kind dnsmessage.Type) (string, error) {
	n, err := dnsmessage.NewName(name)
	if err != nil {
		return "", err
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 7, RecursionDesired: true})
	b.StartQuestions()
	b.Question(dnsmessage.Question{Name: n, Type: kind, Class: dnsmessage.ClassINET})
	q, err := b.Finish()
	if err != nil {
		return "", err
	}
	if network == "tcp" {
		q = append([]byte{0, byte(len(q))}, q...)
	}
	c, err := net.DialTimeout(network, server, moment)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(moment))
	if _, err := c.Write(q); err != nil {
		return "", err
	}
	buf := make([]byte, 4096)
	size, err := c.Read(buf)
	if err != nil {
		return "", err
	}
	buf = buf[:size]
	if network == "tcp" && size > 2 {
		buf = buf[2:]
	}
	var m dnsmessage.Message
	if err := m.Unpack(buf); err != nil {
		return "", err
	}
	if len(m.Answers) > 0 {
		return "open: " + gatetest.Banner + " " + m.Answers[0].GoString(), nil
	}
	return m.RCode.String(), nil
}
