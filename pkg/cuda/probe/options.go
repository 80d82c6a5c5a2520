// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
)

// Options say what a run of cuda-probe does.
type Options struct {
	// Library is libcuda's path, or a name for the dynamic linker.
	Library string
	// DevRoot is the root whose NVIDIA nodes are those of /dev, if it is not empty.
	DevRoot string
	// SharedMemory is bound over /dev/shm, if it is not empty.
	SharedMemory string
	// Binds are bound, in order.
	Binds Binds
	// User is the user that the program becomes after that, unless it is 0.
	User int
	// Look ends the program after the devices, without a context.
	Look bool
	// Device is the number of the device to make a context on.
	Device int
	// Allocate are amounts of memory to take one after the other.
	Allocate Sizes
	// FillUpTo takes as much memory as there is, but never more than the sum of this.
	FillUpTo Sizes
	// Hold keeps the context until the program is asked to end; Busy gives the device
	// work meanwhile.
	Hold, Busy bool
}

// Parse reads the arguments of cuda-probe: the inverse of Arguments. The error names
// the flag, its value and what would be right.
func Parse(args []string) (Options, error) {
	var o Options
	flags := o.flags()
	if err := flags.Parse(args); err != nil {
		return Options{}, err
	}
	var errs []error
	if flags.NArg() > 0 {
		errs = append(errs, fmt.Errorf("got argument %q: want flags only", flags.Arg(0)))
	}
	if o.Library == "" {
		errs = append(errs, errors.New(`-library is "": want a path or the name of a library`))
	}
	if o.Device < 0 {
		errs = append(errs, fmt.Errorf("-device is %d: want 0 or more", o.Device))
	}
	if o.User < 0 {
		errs = append(errs, fmt.Errorf("-user is %d: want 0 or more", o.User))
	}
	for name, folder := range map[string]string{"dev-root": o.DevRoot, "shm": o.SharedMemory} {
		if folder != "" && !filepath.IsAbs(folder) {
			errs = append(errs, fmt.Errorf("-%s is %q: want an absolute path", name, folder))
		}
	}
	return o, errors.Join(errs...)
}

func (o *Options) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("cuda-probe", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&o.Library, "library", "libcuda.so.1", "libcuda to load: a path, or a name that the dynamic linker finds")
	flags.StringVar(&o.DevRoot, "dev-root", "", "root whose NVIDIA device nodes this program sees in /dev; needs root")
	flags.StringVar(&o.SharedMemory, "shm", "", "directory that becomes this program's /dev/shm; needs root")
	flags.Var(&o.Binds, "bind", "FROM:TO, a file or directory that becomes another one of this program's; needs root")
	flags.IntVar(&o.User, "user", 0, "user and group to become; needs root")
	flags.BoolVar(&o.Look, "look", false, "end after listing the devices")
	flags.IntVar(&o.Device, "device", 0, "number of the device to make a context on, as CUDA counts")
	flags.Var(&o.Allocate, "allocate", "amounts of memory to take one after the other, such as 512Mi,2Gi")
	flags.Var(&o.FillUpTo, "fill-up-to", "take all memory there is, up to this much, such as 2Gi")
	flags.BoolVar(&o.Hold, "hold", false, "keep the context until SIGTERM, or until the standard input ends")
	flags.BoolVar(&o.Busy, "busy", false, "hold, and give the device work meanwhile")
	return flags
}

// Usage returns what cuda-probe prints for -help.
func Usage() string {
	var text strings.Builder
	flags := (&Options{}).flags()
	flags.SetOutput(&text)
	text.WriteString("cuda-probe makes a CUDA context, takes memory, and says what it got, as lines of JSON.\n\n")
	flags.PrintDefaults()
	return text.String()
}

// Arguments returns the options as arguments of cuda-probe.
func (o Options) Arguments() []string {
	var args []string
	add := func(name, value string) {
		if value != "" {
			args = append(args, "-"+name+"="+value)
		}
	}
	add("library", o.Library)
	add("dev-root", o.DevRoot)
	add("shm", o.SharedMemory)
	for _, b := range o.Binds {
		add("bind", b.String())
	}
	if o.User != 0 {
		add("user", strconv.Itoa(o.User))
	}
	if o.Device != 0 {
		add("device", strconv.Itoa(o.Device))
	}
	add("allocate", o.Allocate.String())
	add("fill-up-to", o.FillUpTo.String())
	for _, f := range []struct {
		name string
		set  bool
	}{{"look", o.Look}, {"hold", o.Hold}, {"busy", o.Busy}} {
		if f.set {
			args = append(args, "-"+f.name)
		}
	}
	return args
}

// Bind is a file or folder that becomes another one.
type Bind struct{ From, To string }

// String returns both paths, with a colon between them.
func (b Bind) String() string { return b.From + ":" + b.To }

// Binds are the value of a flag that can be given several times.
type Binds []Bind

// String returns all of them.
func (b *Binds) String() string { return fmt.Sprint([]Bind(*b)) }

// Set adds one.
func (b *Binds) Set(text string) error {
	from, to, ok := strings.Cut(text, ":")
	if !ok || !filepath.IsAbs(from) || !filepath.IsAbs(to) {
		return errors.New("want two absolute paths with a colon between them")
	}
	*b = append(*b, Bind{from, to})
	return nil
}

// Sizes are amounts of memory, in bytes.
type Sizes []uint64

const (
	kibibyte = 1 << 10
	mebibyte = 1 << 20
	gibibyte = 1 << 30
)

// Sum returns all of them together.
func (s Sizes) Sum() uint64 {
	var sum uint64
	for _, size := range s {
		sum += size
	}
	return sum
}

// String returns them as Set reads them.
func (s *Sizes) String() string {
	texts := make([]string, len(*s))
	for i, size := range *s {
		texts[i] = strconv.FormatUint(size, 10)
		if size%mebibyte == 0 {
			texts[i] = strconv.FormatUint(size/mebibyte, 10) + "Mi"
		}
	}
	return strings.Join(texts, ",")
}

// Set reads amounts that are separated by commas: numbers of bytes, or numbers with
// Ki, Mi or Gi.
func (s *Sizes) Set(text string) error {
	*s = nil
	for word := range strings.SplitSeq(text, ",") {
		digits, unit := word, uint64(1)
		for name, u := range map[string]uint64{"Ki": kibibyte, "Mi": mebibyte, "Gi": gibibyte} {
			if rest, ok := strings.CutSuffix(word, name); ok {
				digits, unit = rest, u
			}
		}
		const most = 1 << 23 // Gi, far more than any device has
		n, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || n == 0 || n > most*gibibyte/unit {
			return fmt.Errorf("%q is not an amount of memory such as 512Mi or 2Gi", word)
		}
		*s = append(*s, n*unit)
	}
	return nil
}
